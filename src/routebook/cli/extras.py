"""What an extra brings, or a clear word about what to install for it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from routebook.errors import MissingExtraError


def engine_module(name: str) -> ModuleType:
    """Import `routebook.engine.<name>`.

    Raises:
        MissingExtraError: torch or transformers is not installed.
    """
    return extra_module(f"engine.{name}", "engine")


def extra_module(name: str, extra: str) -> ModuleType:
    """Import `routebook.<name>`, which needs an extra.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    try:
        return import_module(f"routebook.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("routebook"):
            raise
        raise MissingExtraError(
            f"this command needs {error.name!r}; install it with: pip install 'routebook[{extra}]'"
        ) from error
