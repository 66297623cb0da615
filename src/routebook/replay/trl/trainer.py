"""GRPO in TRL, along the routes of its rollouts.

TRL computes log-probabilities in one method, whether they are those of the loss, the old ones or the reference's. Here
that method runs inside of a replay of the records that belong to its sequences. Which record belongs to a sequence is
told by its tokens; a number that travels with it through shuffles and splits tells sequences of the same tokens apart.

Legend of shape suffixes: B = batch, S = padded length, C = padded completion length, T = tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from routebook.errors import ConfigError, MissingExtraError, ReplayError
from routebook.replay.session import RouteSession
from routebook.replay.trl.config import ReplayConfig
from routebook.replay.trl.metrics import ReplayMetrics
from routebook.replay.trl.route_book import Rollout, RouteBook, Tokens
from routebook.replay.trl.sampling import ROUTES, VERSION, check_versions
from routebook.routes import RoutedExperts

try:
    from trl import GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"R3GRPOTrainer needs {error.name!r}; install it with: pip install 'routebook[trl]'"
    ) from error

RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
"""TRL's: prompts and the trainer in, `prompt_ids`, `completion_ids`, `logprobs` and more out."""

_NUMBER = "rollout_number"
"""Key of the training batch: int64 `[B]`, which rollout of its generation each sequence is."""


class R3GRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` with Rollout Routing Replay.

    Each sequence is trained along the experts that the engine took for it: in the pass of the loss, in that of the old
    log-probabilities, and if asked for in the reference's. Gradients reach the routers through the weights of those
    experts. The loss itself is TRL's.

    The sequences' tokens find their records, in every pass, whatever was shuffled, split or padded. Several completions
    of the same tokens keep each its own record. Records are held for one generation, the current one, and apart for
    training and evaluation.

    Everything is done by overriding methods that call `super()`, so a `GRPOTrainer` of your own is joined with
    `class Mine(R3GRPOTrainer, MyGRPOTrainer)`.

    Logged beside TRL's metrics: `replay/sequences` and `replay/native_rows`, the shares of the loss's sequences that
    had a record and of their rows that took the live router; `replay/twins`, the share of completions whose tokens
    another one of the generation has too; `replay/weight_version`, if the rollouts tell it; and `replay/gap/...`, how
    far the trainer's probabilities are from the engine's, before the first update on a sequence: see `Gap.metrics`.
    `replay/native_gap/...` is the same for the live routers, every `native_every` generations. The load-balancing loss,
    where the model's config has one, is computed from the live routers' choice.

    Args:
        args: positional arguments of `GRPOTrainer`; its `rollout_func` is given by name.
        rollout_func: as TRL's, with one more key in what it returns: `routed_experts`, for each completion a
            :class:`RoutedExperts` of prompt and completion, or None. :class:`EngineRollouts` and
            :class:`ServerRollouts` are such functions.
        replay: which passes are replayed and what is measured.
        kwargs: further arguments of `GRPOTrainer`.

    Raises:
        ConfigError: an option of TRL with which sequences cannot be followed, or a reference without `beta`.
        DenseModelError: the model has no MoE layer.
        UncapturableError: a router that cannot be steered; the message names it and the reason.
    """

    def __init__(
        self,
        *args: Any,
        rollout_func: RolloutFunction,
        replay: ReplayConfig | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_arguments(rollout_func, kwargs)
        self.replay = replay or ReplayConfig()
        self._identity = object()
        self._num_weight_changes = 0
        self._ask_rollouts = rollout_func
        self._pass: _LossPass | None = None
        self._is_generating = False
        self._num_generations_made = 0
        self._measured = {
            mode: ReplayMetrics(self.replay.extreme_ratio) for mode in ("train", "eval")
        }
        super().__init__(*args, rollout_func=self._roll_out, **kwargs)
        _refuse_set_up(self)
        self.add_callback(_WeightsChange(self))
        self.session = RouteSession(self.model) if self.replay.enabled else None
        """Replays in the model; None if replay is not enabled."""
        self.reference_session = RouteSession(self.ref_model) if self.replay.reference else None
        """Replays in the reference model, if that was asked for."""
        self._books = {} if self.session is None else self._new_books(self.session)

    @property
    def weights_state(self) -> tuple[Any, ...]:
        """Another value whenever this trainer's weights may have changed, and never that of another trainer's.

        Rollout functions compare it. Seen are optimizer steps, the begin and end of a training, which may load weights,
        and whatever else writes parameters or buffers in place or puts others there; not what writes through `.data`.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        written = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
        return (self._identity, self._num_weight_changes, written)

    def _new_books(self, session: RouteSession) -> dict[str, RouteBook]:
        options = {
            "refuses_absent": self.replay.missing == "error",
            "masks_truncated": bool(self.mask_truncated_completions),
        }
        return {mode: RouteBook(session.schema, **options) for mode in ("train", "eval")}

    def _roll_out(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: asks the caller's, and keeps the records."""
        output = dict(self._ask_rollouts(prompts, trainer))
        records, version = output.pop(ROUTES, None), output.pop(VERSION, None)
        if version is not None:
            check_versions(records or (), version)
            self._measured[self._mode].add_share("weight_version", version, 1)
        if self.session is None:
            return output
        if records is None:
            raise ReplayError(
                f"rollout_func returned no {ROUTES!r}; give one RoutedExperts or None per completion"
            )
        book = self._books[self._mode]
        book.replace(output["prompt_ids"], output["completion_ids"], records)
        self._measured[self._mode].add_share("twins", book.num_twins, len(book.rollouts))
        return output

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._is_generating = True
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._is_generating = False
        if self.session is not None:
            self._books[self._mode].check_order(_sequences(*_whole(output)))
        device = output["completion_ids"].device
        output[_NUMBER] = torch.arange(len(output["completion_ids"]), device=device)
        if "old_per_token_logps" in output:
            self._measure("gap", output["old_per_token_logps"], output)
        every = self.replay.native_every
        if every and self._num_generations_made % every == 0:
            self._measure("native_gap", self._native_logps(output), output)
        self._num_generations_made += 1
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        # A reward function that asks for log-probabilities does so in an order of its own.
        self._is_generating = False
        try:
            return super()._calculate_rewards(*args, **kwargs)
        finally:
            self._is_generating = True

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._pass = loss_pass = _LossPass(inputs.get(_NUMBER))
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._pass = None
        if self.session is not None and loss_pass.logps_BC is None:
            raise ReplayError(
                "the loss was computed without _get_per_token_logps_and_entropies, where routes are replayed, so it "
                "ran along the live routers; call that method, or set ReplayConfig(enabled=False)"
            )
        if loss_pass.logps_BC is not None and "old_per_token_logps" not in inputs:
            self._measure("gap", loss_pass.logps_BC, inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        compute = super()._get_per_token_logps_and_entropies
        session = self.session
        if self.ref_model is not None and model is self.ref_model:
            session = self.reference_session
        sequences = _sequences(input_ids, attention_mask)
        records = [None] * len(sequences) if session is None else self._records_of(sequences)
        parts = []
        size = batch_size or len(sequences)
        for start in range(0, len(sequences), size):
            chunk = slice(start, start + size)
            with _replaying(session, records[chunk]):
                parts.append(
                    compute(
                        model, input_ids[chunk], attention_mask[chunk], logits_to_keep, **kwargs
                    )
                )
        logps_BC, entropies_BC, aux_loss = _joined(parts)
        if self._pass is not None:
            self._pass.logps_BC = logps_BC.detach()
        return logps_BC, entropies_BC, aux_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was measured since the last log."""
        for name, value in self._measured[self._mode].take(self.accelerator).items():
            self._metrics[self._mode][f"replay/{name}"] = [value]
        super().log(logs, start_time)

    def _records_of(self, sequences: list[Tokens]) -> list[RoutedExperts | None]:
        """The record of each sequence; None where the live router may run."""
        book, numbers = self._books[self._mode], None
        if self._pass is not None:
            numbers = _numbers(self._pass)
        elif not self._is_generating:
            raise ReplayError(
                "log-probabilities are asked for outside of a generation and of a loss, where sequences of the same "
                "tokens cannot be told apart; ask within session.forward(records) of your own"
            )
        rollouts = book.find(sequences, numbers)
        if self._pass is not None:
            self._count([rollout for rollout in rollouts if rollout is not None])
        return [None if rollout is None else rollout.record for rollout in rollouts]

    def _count(self, rollouts: list[Rollout]) -> None:
        num_replayed = sum(rollout.record is not None for rollout in rollouts)
        num_native = sum(rollout.num_absent for rollout in rollouts)
        num_needed = sum(rollout.num_needed for rollout in rollouts)
        self._measured[self._mode].add_share("sequences", num_replayed, len(rollouts))
        self._measured[self._mode].add_share("native_rows", num_native, num_needed)

    def _native_logps(self, output: dict[str, Any]) -> torch.Tensor:
        """The live routers' log-probabilities of a generation."""
        input_ids, mask = _whole(output)
        size = getattr(self.args, f"per_device_{self._mode}_batch_size")
        checkpointing = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            logps_BC, _, _ = super()._get_per_token_logps_and_entropies(
                self.model, input_ids, mask, output["completion_ids"].size(1), batch_size=size
            )
        return logps_BC  # type: ignore[no-any-return]

    def _measure(self, name: str, logps_BC: torch.Tensor, batch: dict[str, Any]) -> None:
        rollout_BC = batch.get("sampling_per_token_logps")
        if rollout_BC is not None:
            mask_BC = batch["completion_mask"] * batch.get("tool_mask", 1)
            self._measured[self._mode].gap(name).add(logps_BC, rollout_BC, mask_BC)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"


@dataclass(slots=True)
class _LossPass:
    """The pass of one loss."""

    numbers_B: torch.Tensor | None
    logps_BC: torch.Tensor | None = None


class _WeightsChange(TrainerCallback):  # type: ignore[misc]
    """Counts when weights may have changed: by a step, or by a checkpoint that is loaded before or after training."""

    def __init__(self, trainer: R3GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._num_weight_changes += 1

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._num_weight_changes += 1

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._num_weight_changes += 1


def _replaying(
    session: RouteSession | None, records: Sequence[RoutedExperts | None]
) -> AbstractContextManager[Any]:
    """Replay of a chunk; one that has no record at all runs as without a session."""
    if session is None or all(record is None for record in records):
        return nullcontext()
    return session.forward(records)


def _numbers(loss_pass: _LossPass) -> list[int]:
    if loss_pass.numbers_B is None:
        raise ReplayError(
            f"the batch of a loss has no {_NUMBER!r}; keep what _generate_and_score_completions returns"
        )
    return [int(number) for number in loss_pass.numbers_B.tolist()]


def _whole(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their completions `[B, S]`, and their attention masks."""
    ids_BS = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids_BS, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def _sequences(input_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor) -> list[Tokens]:
    """The tokens of each line without its padding."""
    ids_BS = input_ids_BS.cpu().numpy().astype(np.int32)
    mask_BS = attention_mask_BS.cpu().numpy().astype(bool)
    return [ids_S[mask_S] for ids_S, mask_S in zip(ids_BS, mask_BS, strict=True)]


def _joined(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Chunks as one batch, as TRL joins them: the load-balancing loss is the mean of theirs."""
    logps, entropies, aux_losses = zip(*parts, strict=True)
    return (
        torch.cat(logps),
        None if entropies[0] is None else torch.cat(entropies),
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )


def _refuse_arguments(rollout_func: Any, kwargs: dict[str, Any]) -> None:
    if not callable(rollout_func):
        raise ConfigError(
            f"rollout_func={rollout_func!r} rolls nothing out; give EngineRollouts(llm), ServerRollouts(client, ...) "
            "or a function of your own that returns routed_experts"
        )
    for name in ("tools", "environment_factory"):
        if kwargs.get(name):
            raise ConfigError(
                f"{name} makes TRL generate further turns itself, which have no routes; run the turns in rollout_func "
                "and mark their tokens with env_mask"
            )


def _refuse_set_up(trainer: Any) -> None:
    if trainer.replay.reference and trainer.ref_model is None:
        raise ConfigError(
            "reference=True replays in the reference model; set beta above 0, or drop it"
        )
    refused = {
        "a processor of images or sound": trainer._is_vlm,
        "PEFT adapters": hasattr(trainer.model, "peft_config"),
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
    }
    for what, is_there in refused.items():
        if is_there:
            raise ConfigError(
                f"R3GRPOTrainer does not know how to follow routes with {what}; leave it out"
            )
