"""Options of the server."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.config import check_at_least, check_at_most, option
from routebook.errors import ConfigError

API_KEY_VARIABLE = "ROUTEBOOK_API_KEY"
"""Environment variable with the key, for those who do not want it on a command line."""

_MOST_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, who may use it, and how much it takes on."""

    host: str = option("address to listen on", default="127.0.0.1")
    port: int = option("port to listen on; 0 takes a free one", default=8000)
    api_key: str | None = option(
        f"key that clients must send; unset takes {API_KEY_VARIABLE} of the environment, and where that is not set"
        " either, everyone is let in",
        default=None,
    )
    served_model_name: str | None = option("name that clients know the model by", default=None)
    chat_template: str | None = option(
        "file with a Jinja chat template; unset takes the tokenizer's", default=None
    )
    return_routed_experts: bool = option(
        "hand out the routed experts where a request does not say", default=False
    )
    max_queued: int = option(
        "completions that wait beyond those that run, at most; more are answered with 429",
        default=1024,
    )
    max_open_requests: int = option(
        "HTTP requests that are open at once, at most; more are answered with 429", default=4096
    )
    max_request_bytes: int = option(
        "bytes of a request body at most; a larger one is answered with 413", default=2**20
    )
    stall_timeout: float = option(
        "seconds after which a client that reads nothing is disconnected", default=60.0
    )
    encoder_threads: int = option("threads that encode routed experts", default=2)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} must lie in [0, 65536)")
        if self.api_key == "":
            raise ConfigError("api_key is empty, which would let everyone in; leave it unset")
        check_at_least("max_queued", self.max_queued, 0)
        check_at_least("max_open_requests", self.max_open_requests, 1)
        check_at_least("max_request_bytes", self.max_request_bytes, 1)
        check_at_most("max_request_bytes", self.max_request_bytes, _MOST_BYTES)
        check_at_least("encoder_threads", self.encoder_threads, 1)
        if not 0.0 < self.stall_timeout < float("inf"):
            raise ConfigError(f"stall_timeout={self.stall_timeout} must be a number above 0")
