"""Routebook: which experts did this token really use?

A name is loaded when it is first used: the record of routed experts needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from routebook.errors import MissingExtraError, RoutebookError

if TYPE_CHECKING:
    from routebook.client import AsyncClient, Client
    from routebook.engine.llm import LLM
    from routebook.engine.sampling_params import SamplingParams
    from routebook.routes import RoutedExperts, RouteSample, RouteSchema, read_routes

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "RouteSample",
    "RouteSchema",
    "RoutebookError",
    "RoutedExperts",
    "SamplingParams",
    "read_routes",
]

_MODULES = {
    "AsyncClient": "routebook.client",
    "Client": "routebook.client",
    "LLM": "routebook.engine.llm",
    "RouteSample": "routebook.routes",
    "RouteSchema": "routebook.routes",
    "RoutedExperts": "routebook.routes",
    "SamplingParams": "routebook.engine.sampling_params",
    "read_routes": "routebook.routes",
}
_EXTRAS = {"AsyncClient": "client", "Client": "client", "LLM": "engine"}
"""What to install for a name whose dependencies are optional."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'routebook' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        raise MissingExtraError(
            f"{name} needs {error.name!r}; install it with: pip install 'routebook[{_EXTRAS[name]}]'"
        ) from error
