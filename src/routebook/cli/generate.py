"""`routebook generate MODEL`: complete prompts and keep the experts of every token."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from routebook.cli.completions import completion_lines
from routebook.cli.extras import engine_module
from routebook.cli.options import add_options, take_options
from routebook.cli.quiet import quiet_loading
from routebook.cli.record import writing
from routebook.engine.config import CacheConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError
from routebook.routes import RoutesWriter

if TYPE_CHECKING:
    from routebook.engine.llm import LLM
    from routebook.engine.outputs import RequestOutput

Prompts = list[str | list[int]]
Show = Callable[["RequestOutput", Any], None]
"""Prints one output, given the model's tokenizer or None."""

_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig)
_DESCRIPTION = """Complete prompts with a mixture-of-experts model and print the completions. With --out, the
experts of every token go into a .routes file, which `inspect` and `verify` read."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts, keeping every token's experts",
        usage="%(prog)s MODEL (--prompt TEXT | --prompts-file FILE) [--out FILE.routes] [options]",
        description=_DESCRIPTION,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or `tiny`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; repeatable; one that begins with a dash needs an equals sign: --prompt=-1+2=",
    )
    source.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="one prompt per line; in a .jsonl file a JSON text or list of token ids per line",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.routes", help="where the record goes")
    for config in (SamplingParams, *_CONFIGS):
        add_options(parser, config)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print the completions, write the record."""
    prompts = _checked(arguments.prompt) or read_prompts(arguments.prompts_file)
    params = SamplingParams(**take_options(arguments, SamplingParams))
    config: dict[str, Any] = {}
    for kind in _CONFIGS:
        config |= take_options(arguments, kind)
    generate(arguments.model, prompts, params, arguments.out, config)
    return 0


def print_completions(output: RequestOutput, tokenizer: Any | None) -> None:
    """Print every completion behind its whole prompt."""
    print(*completion_lines(output, tokenizer), sep="\n")


def generate(
    model: str,
    prompts: Prompts,
    params: SamplingParams,
    out: Path | None,
    config: dict[str, Any],
    *,
    show: Show = print_completions,
) -> None:
    """Generate with the engine, write the record to `out` if given, and show every output.

    A path that cannot be written is refused before the model is loaded, and what was generated is shown even when
    the disk fills up at the end.

    Raises:
        RoutebookError: the model, a prompt, an option or the path cannot be used; no file is left behind, and one
            that was there before is untouched.
    """
    with ExitStack() as stack:
        writer = None if out is None else _open(stack, out, params)
        engine = engine_module("llm")
        quiet_loading(model)
        llm: LLM = engine.LLM(model, **config)
        outputs = llm.generate(prompts, params, progress=True)
        try:
            if writer is not None:
                _write(stack, writer, llm, outputs)
        finally:
            for output in outputs:
                show(output, llm.engine.tokenizer)
    if out is not None:
        print(f"wrote {out}")


def read_prompts(path: Path) -> Prompts:
    """Prompts of a file, one per line, empty lines left out.

    Raises:
        RequestError: the file cannot be read, holds no prompt, or a line is not what it should be.
    """
    try:
        # Only line feeds part prompts: splitlines would also part at characters that a JSON text may hold.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise RequestError(
            f"cannot read the prompts of {path}: {error.strerror}; name a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"cannot read the prompts of {path}: {error}; save it as UTF-8"
        ) from error
    parse = _parse_json_line if path.suffix == ".jsonl" else None
    prompts: Prompts = [
        parse(path, number, line) if parse else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{path} holds no prompt; write one per line")
    return prompts


def _parse_json_line(path: Path, number: int, line: str) -> str | list[int]:
    try:
        return msgspec.json.decode(line, type=str | list[int])
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{path}, line {number}: neither a JSON text nor a list of token ids ({error})"
        ) from error


def _checked(prompts: list[str] | None) -> Prompts:
    """Prompts of the command line; bytes that are no UTF-8 arrive there as lone surrogates."""
    for index, prompt in enumerate(prompts or ()):
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestError(f"prompt {index}: {prompt!r} is not UTF-8; write it in UTF-8")
    return list(prompts or ())


def _open(stack: ExitStack, out: Path, params: SamplingParams) -> RoutesWriter:
    if not params.routed_experts:
        raise RequestError(f"--out {out} needs the routed experts; drop --no-routed-experts")
    if out.is_dir():
        raise RequestError(f"--out {out} is a folder; name a file in it")
    with writing(out):
        return stack.enter_context(RoutesWriter(out))


def _write(stack: ExitStack, writer: RoutesWriter, llm: LLM, outputs: list[RequestOutput]) -> None:
    samples = engine_module("samples")
    with writing(writer.path):
        for output in outputs:
            for choice in output.choices:
                writer.write(samples.make_sample(llm, output, choice))
        # Leaving the writer is what gives the file its name.
        stack.close()
