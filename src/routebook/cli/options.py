"""Command-line flags from config dataclasses: one field, one flag, the field's own text as help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

import msgspec

from routebook.errors import ConfigError

_METAVARS = {int: "N", float: "X", str: "TEXT"}
_NAMES = {int: "a whole number", float: "a number", str: "a text"}


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], *, skip: frozenset[str] = frozenset()
) -> None:
    """Add a flag for every field of a config dataclass but those in `skip`."""
    hints = get_type_hints(kind)
    summary = (kind.__doc__ or "").strip().splitlines()[0]
    group = parser.add_argument_group(kind.__name__, summary)
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
    flag = _flag(field.name)
    choices = field.metadata["choices"]
    help_text = field.metadata["help"] + _default_text(field)
    if hint is bool:
        group.add_argument(
            flag, dest=field.name, action=argparse.BooleanOptionalAction, help=help_text
        )
    elif _is_tuple(hint):
        group.add_argument(
            flag,
            dest=field.name,
            action="append",
            metavar=_METAVARS[_scalar(hint)],
            help=help_text + "; repeatable",
        )
    else:
        metavar = None if choices else _METAVARS[_scalar(hint)]
        group.add_argument(flag, dest=field.name, choices=choices, metavar=metavar, help=help_text)


def _default_text(field: Field[Any]) -> str:
    if field.default in (MISSING, None, ()):
        return ""
    if isinstance(field.default, bool):
        return f" (default: {'on' if field.default else 'off'})"
    return f" (default: {field.default})"


def _convert(name: str, text: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(text, type=hint, strict=False)
    except msgspec.ValidationError as error:
        given = ", ".join(text) if isinstance(text, list) else text
        raise ConfigError(f"{_flag(name)}={given!r} is not {_NAMES[_scalar(hint)]}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_tuple(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is tuple


def _scalar(hint: Any) -> type[Any]:
    """The one type of value in `int`, `int | None` or `tuple[int, ...]`."""
    (scalar,) = (set(get_args(hint)) or {hint}) - {type(None), ...}
    assert isinstance(scalar, type)
    return scalar
