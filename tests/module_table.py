"""The table of modules in ARCHITECTURE.md: `python -m tests.module_table` writes it anew from the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
HEAD = "| module | |\n|---|---|\n"


def module_lines() -> list[str]:
    """One line per module: its path and the first sentence of its docstring."""
    package = ROOT / "src" / "routebook"
    paths = [p for p in sorted(package.rglob("*.py")) if p.name != "__init__.py"]
    return [f"| `{path.relative_to(package)}` | {_first_line(path)} |" for path in paths]


def page() -> str:
    """ARCHITECTURE.md with the present table."""
    return PAGE.read_text().partition(HEAD)[0] + HEAD + "\n".join(module_lines()) + "\n"


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page())
