"""Options of the client."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from routebook.config import check_at_least, check_choice, option
from routebook.errors import ConfigError
from routebook.routes.formats import FORMAT_NAMES


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """Which server, and how patient to be with it."""

    base_url: str = option("address of the server, such as http://localhost:8000")
    api_key: str | None = option("key that the server asks for", default=None)
    model: str | None = option("name of the model; unset takes what the server has", default=None)
    routed_experts_format: str = option(
        "form in which rows travel; all but frame need the model's schema",
        default="frame",
        choices=FORMAT_NAMES,
    )
    timeout: float = option("seconds to wait for the next bytes of an answer", default=600.0)
    connect_timeout: float = option("seconds to wait for a connection", default=10.0)
    max_retries: int = option("times to try again what surely was not started", default=5)
    max_retry_wait: float = option("seconds to wait before a retry, at most", default=30.0)
    max_connections: int = option("connections that are open at once, at most", default=1024)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r} must begin with http:// or https://")
        check_choice("routed_experts_format", self.routed_experts_format, FORMAT_NAMES)
        check_at_least("max_retries", self.max_retries, 0)
        check_at_least("max_connections", self.max_connections, 1)
        for name in ("timeout", "connect_timeout", "max_retry_wait"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number above 0")

    @classmethod
    def from_options(cls, **options: Any) -> ClientConfig:
        """The config of options by name.

        Raises:
            ConfigError: an option that does not exist, or a value that cannot work.
        """
        known = sorted(one.name for one in fields(cls))
        for name in options:
            if name not in known:
                raise ConfigError(f"{name} is not an option; the options are {', '.join(known)}")
        return cls(**options)

    def hurried(self, seconds: float) -> ClientConfig:
        """The same for a call that is not worth more than so many seconds."""
        return replace(self, timeout=seconds, connect_timeout=seconds, max_retries=0)
