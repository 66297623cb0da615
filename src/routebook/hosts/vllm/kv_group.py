"""The KV cache group whose blocks stand for positions one after the other."""

from __future__ import annotations

from typing import Any

from routebook.errors import ConfigError


def positional_group(groups: Any, full_attention: type[Any]) -> tuple[int, int]:
    """Find the group; a window or a recurrent state forgets positions that rows exist of.

    Args:
        groups: `KVCacheConfig.kv_cache_groups`.
        full_attention: vLLM's class of specs of full attention.

    Returns:
        Its index, and the number of tokens in one of its blocks.

    Raises:
        ConfigError: there is none.
    """
    for index, group in enumerate(groups):
        spec: Any = group.kv_cache_spec
        if isinstance(spec, full_attention):
            return index, int(spec.block_size)
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    raise ConfigError(
        f"Routebook needs a KV cache of full attention in vLLM; this model has only {kinds}"
    )
