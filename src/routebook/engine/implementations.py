"""Which attention and experts implementation a transformers model had before an engine set its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Implementations:
    """The settings of one model's config and of all configs in it, outer ones first."""

    settings: tuple[tuple[Any, str | None, str | None], ...]
    """(config, attention, experts)."""

    @classmethod
    def of(cls, model: Any) -> Implementations:
        """Note what a transformers model uses now."""
        configs = {id(config): config for config in _configs(model.config)}
        # A submodel may hold a copy of its part of the config.
        for module in model.modules():
            for config in _configs(getattr(module, "config", None)):
                configs.setdefault(id(config), config)
        return cls(
            tuple(
                (config, config._attn_implementation, config._experts_implementation)
                for config in configs.values()
            )
        )

    def restore(self) -> None:
        """Set them again."""
        for config, attention, experts in self.settings:
            # Setting one sets those inside as well, so these come later.
            config._attn_implementation = attention
            config._experts_implementation = experts


def _configs(config: Any) -> Iterator[Any]:
    if not hasattr(config, "sub_configs"):
        return
    yield config
    for name in config.sub_configs:
        yield from _configs(getattr(config, name, None))
