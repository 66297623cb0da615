"""`python -m routebook.hosts.vllm serve MODEL ...`: vLLM's own server, with rows in it."""

from __future__ import annotations

import sys

from routebook.errors import RoutebookError


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    if argv[:1] != ["serve"]:
        print("usage: python -m routebook.hosts.vllm serve MODEL [options of vllm serve]")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    from routebook.hosts.vllm.serve import serve

    try:
        serve(argv[1:])
    except RoutebookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
