"""What the host is told by way of vLLM's own `additional_config`, and what single requests say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from routebook.config import check_choice, option
from routebook.errors import ConfigError, RequestError

KEY = "routebook"
"""Key of the host's options in `additional_config`. vLLM hashes that dictionary into the key of its compile cache, so
a graph that was compiled without capture is not taken for one with it."""

REQUEST_KEY = "routed_experts"
"""Key in `SamplingParams.extra_args` (`vllm_xargs` over HTTP) by which a request asks for rows, or declines them."""

ALL, ASKED = "all", "asked"


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """Options of Routebook inside vLLM."""

    rows: str = option(
        "which requests get rows: `all` that do not decline them (the default), or only those that `asked`",
        default=ALL,
        choices=(ALL, ASKED),
    )

    def __post_init__(self) -> None:
        check_choice("rows", self.rows, (ALL, ASKED))

    @classmethod
    def read(cls, additional_config: Any) -> HostConfig:
        """Take the options from vLLM's `additional_config`; the defaults if it has none.

        Raises:
            ConfigError: an option that does not exist, or a value that cannot work.
        """
        has_options = isinstance(additional_config, Mapping)
        options = additional_config.get(KEY, {}) if has_options else {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"additional_config[{KEY!r}]={options!r} is not a dictionary")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(
                f"additional_config[{KEY!r}] has no option {unknown[0]!r}; there are {sorted(known)}"
            )
        return cls(**options)

    def add_to(self, additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return `additional_config` with these options in it.

        Raises:
            ConfigError: it has other options of the host already.
        """
        config = dict(additional_config or {})
        if KEY in config and HostConfig.read(config) != self:
            raise ConfigError(
                f"additional_config[{KEY!r}]={config[KEY]!r} contradicts {self}; give one of them"
            )
        config[KEY] = asdict(self)
        return config

    def wants_rows(self, extra_args: Mapping[str, Any] | None) -> bool:
        """Whether a request with these extra arguments gets rows.

        Raises:
            RequestError: its wish is neither true nor false (1 and 0 count, as HTTP has no booleans here).
        """
        wish = (extra_args or {}).get(REQUEST_KEY)
        if wish is None:
            return self.rows == ALL
        # Not `wish in (...)`: a list is no answer, and 1.0 is none either.
        if type(wish) not in (bool, int) or wish not in (0, 1):
            raise RequestError(
                f"extra_args[{REQUEST_KEY!r}]={wish!r} is neither true (1) nor false (0)"
            )
        return bool(wish)
