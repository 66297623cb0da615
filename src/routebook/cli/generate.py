"""`routebook generate MODEL`: complete prompts and keep the experts of every token."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from routebook.cli.extras import engine_module
from routebook.cli.options import add_options, take_options
from routebook.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError
from routebook.routes import RoutesWriter

_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("generate", help="complete prompts, keeping every token's experts")
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or `tiny`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; repeatable")
    source.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="one prompt per line; in a .jsonl file a JSON text or list of token ids per line",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.routes", help="where the record goes")
    add_options(parser, SamplingParams)
    for config in _CONFIGS:
        add_options(parser, config)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print the completions, write the record."""
    prompts = arguments.prompt or read_prompts(arguments.prompts_file)
    params = SamplingParams(**take_options(arguments, SamplingParams))
    config: dict[str, Any] = {}
    for kind in _CONFIGS:
        config |= take_options(arguments, kind)
    generate(arguments.model, prompts, params, arguments.out, config)
    return 0


def generate(
    model: str,
    prompts: list[str | list[int]],
    params: SamplingParams,
    out: Path | None,
    config: dict[str, Any],
) -> None:
    """Generate with the engine, print every completion, and write the record to `out` if given.

    Raises:
        RoutebookError: the model, a prompt, an option or the path cannot be used; no file is left behind.
    """
    if out is not None and not params.routed_experts:
        raise RequestError(f"--out {out} needs the routed experts; drop --no-routed-experts")
    if out is None:
        _generate(model, prompts, params, config, None)
    else:
        with RoutesWriter(out) as writer:
            _generate(model, prompts, params, config, writer)
        print(f"wrote {out}")


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a file, one per line, empty lines left out.

    Raises:
        RequestError: the file cannot be read, holds no prompt, or a line is not what it should be.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompts of {path}: {error}") from error
    parse = _parse_json_line if path.suffix == ".jsonl" else None
    prompts: list[str | list[int]] = [
        parse(path, number, line) if parse else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{path} holds no prompt")
    return prompts


def _parse_json_line(path: Path, number: int, line: str) -> str | list[int]:
    try:
        return msgspec.json.decode(line, type=str | list[int])
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{path}, line {number}: neither a JSON text nor a list of token ids ({error})"
        ) from error


def _generate(
    model: str,
    prompts: list[str | list[int]],
    params: SamplingParams,
    config: dict[str, Any],
    writer: RoutesWriter | None,
) -> None:
    llm = engine_module("llm").LLM(model, **config)
    outputs = llm.generate(prompts, params, progress=True)
    samples = engine_module("samples")
    for output in outputs:
        for choice in output.choices:
            print(f"[{output.request_id}.{choice.index}] {output.prompt or ''}{choice.text}")
            if writer is not None:
                writer.write(samples.make_sample(llm, output, choice))
