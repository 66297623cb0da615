"""How a component declares its options.

Each component owns one frozen, keyword-only dataclass whose fields are made with :func:`option`. The text given
there is the only documentation of the option: the command line derives its flags and its help from it.
"""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

from routebook.errors import ConfigError


def option(help: str, *, default: Any = MISSING, choices: tuple[str, ...] | None = None) -> Any:
    """Declare one field of a config dataclass.

    Args:
        help: what the option does, its unit and its default, for people.
        default: the default value; without one the field is required.
        choices: the accepted values of a string option; check them with :func:`check_choice`.
    """
    return field(default=default, metadata={"help": help, "choices": choices})


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known; use one of {', '.join(choices)}")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ConfigError unless `value >= least`."""
    if value < least:
        raise ConfigError(f"{name}={value} is too small; it must be at least {least}")


def check_at_most(name: str, value: float, most: float) -> None:
    """Raise ConfigError unless `value <= most`."""
    if value > most:
        raise ConfigError(f"{name}={value} is too large; it must be at most {most}")
