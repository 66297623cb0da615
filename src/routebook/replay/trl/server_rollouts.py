"""Rollouts by a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routebook.config import check_at_least
from routebook.errors import ConfigError, ServerError
from routebook.replay.trl.sampling import (
    Completion,
    rollout_output,
    sampling_params,
    tokenized,
)

if TYPE_CHECKING:
    from routebook import Client

UpdateWeights = Callable[[Any], int | None]
"""Brings the trainer's weights to the server; returns their version as the rows tell it, None if they do not."""


class ServerRollouts:
    """A rollout function: completions by a server that speaks `/inference/v1/generate`, Routebook's or vLLM's.

    The server first gets the trainer's weights, as the embedded engine does in :class:`EngineRollouts`; sampling
    options and log-probabilities are as there.

    Args:
        client: a :class:`routebook.Client` of the server.
        weights_dir: a folder that trainer and server both see, for a Routebook server: the model is saved there, and
            the server told to load it.
        update_weights: what brings the weights there instead, called with the trainer in every process; for servers
            that have another way.
        max_requests: requests that are open at once, at most.

    Raises:
        ConfigError: not exactly one of `weights_dir` and `update_weights`, or less than one request.
    """

    def __init__(
        self,
        client: Client,
        *,
        weights_dir: str | Path | None = None,
        update_weights: UpdateWeights | None = None,
        max_requests: int = 64,
    ) -> None:
        if (weights_dir is None) == (update_weights is None):
            raise ConfigError(
                "give weights_dir, for a Routebook server, or update_weights, for any other, and not both: a server "
                "that keeps its first weights samples from another policy than the one that is trained"
            )
        check_at_least("max_requests", max_requests, 1)
        self.client = client
        if update_weights is None:
            assert weights_dir is not None
            update_weights = SavedWeights(client, Path(weights_dir))
        self._update_weights = update_weights
        self._max_requests = max_requests
        self._seen: tuple[Any, ...] | None = None
        self._version: int | None = None
        self._calls = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Complete each prompt once; see :meth:`EngineRollouts.__call__`.

        Raises:
            RoutebookError: as there, and what :meth:`Client.generate` raises.
        """
        prompt_ids = tokenized(prompts, trainer)
        params = sampling_params(trainer, len(prompt_ids), self._calls)
        self._calls += 1
        state = trainer.weights_state
        if state != self._seen:
            self._version = self._update_weights(trainer)
            self._seen = state
        with ThreadPoolExecutor(min(self._max_requests, len(prompt_ids))) as pool:
            generations = list(pool.map(self.client.generate, prompt_ids, params))
        return rollout_output(prompt_ids, map(_completion, generations), self._version)


class SavedWeights:
    """Saves the model where a Routebook server can read it, and tells the server."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._config = client.config
        self._folder = folder

    def __call__(self, trainer: Any) -> int:
        """Returns the version of the weights.

        Raises:
            ServerError: the server did not take them.
        """
        from accelerate.utils import broadcast_object_list

        versions: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            trainer.model.save_pretrained(self._folder)
            versions = [self._told()]
        broadcast_object_list(versions)
        return int(versions[0])

    def _told(self) -> int:
        import httpx

        key = self._config.api_key
        try:
            response = httpx.post(
                f"{self._config.base_url.rstrip('/')}/update_weights",
                json={"model_path": str(self._folder.resolve())},
                headers={} if key is None else {"authorization": f"Bearer {key}"},
                timeout=self._config.timeout,
            )
        except httpx.TransportError as error:
            raise ServerError(f"the server did not take the new weights: {error!r}") from error
        if response.status_code != 200:
            raise ServerError(
                f"the server did not take the new weights: {response.text[:500]}",
                response.status_code,
            )
        return int(response.json()["weight_version"])


def _completion(generation: Any) -> Completion:
    (choice,) = generation.choices
    entries = None if choice.logprobs is None else choice.logprobs["content"]
    return Completion(
        token_ids=choice.token_ids,
        logprobs=None if entries is None else [entry["logprob"] for entry in entries],
        routed_experts=choice.routed_experts,
        finish_reason=choice.finish_reason,
    )
