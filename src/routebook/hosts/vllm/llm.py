"""vLLM's offline `LLM`, with rows in `CompletionOutput.routed_experts`.

Legend of shape suffixes: T = rows, H = hidden layers, K = top-k.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.platforms import current_platform

from routebook.errors import RequestError
from routebook.hosts.vllm.config import HostConfig
from routebook.hosts.vllm.launch import check_platform, engine_args
from routebook.hosts.vllm.step_plan import WEIGHT_VERSION
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats.raw_ids import record_of_hidden_layers
from routebook.routes.formats.tokens_after import TokensAfter


class LLM(vllm.LLM):  # type: ignore[misc]
    """vLLM's `LLM`; every argument but `routebook` is vLLM's own.

    A finished completion has `routed_experts`, `[T, H, K]`: for a prompt of P and C new tokens, rows from
    `SamplingParams.routed_experts_prompt_start` to P + C - 2, over all hidden layers, dense ones as zeros. It is None
    where the request declined rows, or where a row is not known; never are rows left out or made up.

    Args:
        model: as vLLM takes it.
        routebook: options of the host, the defaults if None.
        args: vLLM's own.
        kwargs: vLLM's own.

    Raises:
        ConfigError: rows cannot be had with these arguments. In a process of its own, vLLM's engine prints the reason
            and the exception here is vLLM's.
    """

    def __init__(
        self, model: str, *args: Any, routebook: HostConfig | None = None, **kwargs: Any
    ) -> None:
        check_platform(current_platform.is_cpu())
        super().__init__(model, *args, **engine_args(routebook or HostConfig(), kwargs))

    def route_schema(self) -> RouteSchema:
        """Layers, experts and top-k of the rows."""
        schema: RouteSchema = self.collective_rpc("route_schema")[0]
        return schema

    def record(self, request_output: Any, index: int = 0, *, start: int = 0) -> RoutedExperts:
        """The rows of a finished completion as a record.

        Args:
            request_output: a `RequestOutput` of this engine.
            index: which of its completions.
            start: `routed_experts_prompt_start` of its sampling parameters.

        Raises:
            RequestError: the completion has no rows, or not those of its tokens from `start` on.
            FormatError: what it has are no rows of this model, see :func:`record_of_hidden_layers`.
        """
        completion = request_output.outputs[index]
        ids_THK = completion.routed_experts
        if ids_THK is None:
            raise RequestError(
                f"completion {index} of request {request_output.request_id} has no rows: it did not ask"
                " for them, has no token, or the engine's log says why it could not get them"
            )
        schema = self.route_schema()
        token_ids = [*request_output.prompt_token_ids, *completion.token_ids]
        num_rows = len(token_ids) - 1 - start
        if len(ids_THK) != num_rows:
            raise RequestError(
                f"completion {index} of request {request_output.request_id} has {len(ids_THK)} rows;"
                f" {len(token_ids)} tokens from start={start} on have {num_rows}"
            )
        tokens = TokensAfter.of(token_ids, start)
        return record_of_hidden_layers(ids_THK, schema, tokens, WEIGHT_VERSION)
