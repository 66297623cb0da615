"""The engine, or a clear word about what to install for it."""

from __future__ import annotations

from types import ModuleType

from routebook.errors import MissingExtraError


def engine_module(name: str) -> ModuleType:
    """Import `routebook.engine.<name>`.

    Raises:
        MissingExtraError: torch or transformers is not installed.
    """
    from importlib import import_module

    try:
        return import_module(f"routebook.engine.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("routebook"):
            raise
        raise MissingExtraError(
            f"this command needs {error.name!r}; install it with: pip install 'routebook[engine]'"
        ) from error
