"""Command-line flags from config dataclasses: one field, one flag, the field's own text as help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

import msgspec

from routebook.errors import ConfigError


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], *, skip: frozenset[str] = frozenset()
) -> None:
    """Add a flag for every field of a config dataclass but those in `skip`."""
    hints = get_type_hints(kind)
    group = parser.add_argument_group(kind.__name__)
    for field in fields(kind):
        if field.name not in skip:
            _add_flag(group, field, hints[field.name])


def take_options(arguments: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """What was given for the fields of `kind`, converted to their types; absent flags are left out.

    Raises:
        ConfigError: a text that is no value of the field's type.
    """
    hints = get_type_hints(kind)
    given = {
        f.name: getattr(arguments, f.name)
        for f in fields(kind)
        if getattr(arguments, f.name, None) is not None
    }
    return {name: _convert(name, text, hints[name]) for name, text in given.items()}


def _add_flag(group: Any, field: Field[Any], hint: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    help_text = field.metadata["help"]
    if field.default not in (MISSING, None, ()):
        help_text += f" (default: {field.default})"
    if hint is bool:
        group.add_argument(
            flag, dest=field.name, action=argparse.BooleanOptionalAction, help=help_text
        )
    elif str(hint).startswith("tuple"):
        group.add_argument(flag, dest=field.name, action="append", help=help_text + "; repeatable")
    else:
        choices = field.metadata["choices"]
        group.add_argument(
            flag, dest=field.name, choices=choices, help=help_text, metavar=None if choices else "X"
        )


def _convert(name: str, text: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(text, type=hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--{name.replace('_', '-')}={text!r}: {error}") from error
