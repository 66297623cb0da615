"""Routebook: which experts did this token really use?

The record of routed experts needs neither torch nor transformers; the engine is loaded when `LLM` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routebook.engine.sampling_params import SamplingParams
from routebook.errors import MissingExtraError, RoutebookError
from routebook.routes import RoutedExperts, RouteSample, RouteSchema, read_routes

if TYPE_CHECKING:
    from routebook.engine.llm import LLM

__all__ = [
    "LLM",
    "RouteSample",
    "RouteSchema",
    "RoutebookError",
    "RoutedExperts",
    "SamplingParams",
    "read_routes",
]


def __getattr__(name: str) -> Any:
    if name != "LLM":
        raise AttributeError(f"module 'routebook' has no attribute {name!r}")
    try:
        from routebook.engine.llm import LLM
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"LLM needs {error.name!r}; install it with: pip install 'routebook[engine]'"
        ) from error
    return LLM
