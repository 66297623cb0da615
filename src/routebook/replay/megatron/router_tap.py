"""One router while a schedule runs: which routes it takes now, and which ones a recomputation takes later.

Every class of `RouterReplay` is asked by one call, `get_replay_topk`. The tap answers it, for as long as a schedule
runs, in place of the class. So nobody sets an action or flips one, and the class's own queue stays empty.

A checkpointed layer runs again in backward. Autograd numbers its nodes in the order in which they are made, and the
node of a checkpoint is made before the layers in it run; so the run that a node recomputes is the first one of this
router after the node. That holds in whatever order micro-batches go backward, where a queue would have to guess.

Legend of shape suffixes: T = rows, E = experts, K = top-k.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from routebook.errors import ReplayError

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class LayerRoutes:
    """What one router takes in one forward."""

    ids_TK: torch.Tensor
    """int64 `[T, K]`."""

    forced_T: torch.Tensor | None
    """bool `[T]`: rows to replay, the others are the live router's; None if all are replayed."""


class RouterTap:
    """Answers for one router what it chooses.

    Args:
        layer_id: its decoder layer, counted from 0.
        name: the module, for messages.
        replay: the object that the router asks.
    """

    def __init__(self, *, layer_id: int, name: str, replay: Any) -> None:
        self.layer_id = layer_id
        self.name = name
        self._replay = replay
        self._routes: LayerRoutes | None = None
        self._has_run = False
        self._keeps = False
        self._thread = 0
        self._marks: list[int] = []
        self._kept: dict[int, LayerRoutes] = {}

    @property
    def num_kept(self) -> int:
        """Forwards that wait for their recomputation."""
        return len(self._kept)

    def attach(self) -> None:
        """Take the place of the class's own answer.

        Raises:
            ReplayError: somebody else replays or records with this router, or left entries behind.
        """
        self.check_untouched()
        if "get_replay_topk" in vars(self._replay):
            raise ReplayError(f"{self.name} is in another schedule that has not ended")
        self._marks, self._kept = [], {}
        self._thread = threading.get_ident()
        self._replay.get_replay_topk = self.get_replay_topk

    def detach(self) -> None:
        """Leave the router as it was found."""
        del self._replay.get_replay_topk
        self._routes, self._marks, self._kept = None, [], {}

    def check_untouched(self) -> None:
        """Check that nobody else uses the router's `RouterReplay`.

        Raises:
            ReplayError: an action is set, or there are entries that nobody took.
        """
        action = self._replay.router_replay_action
        if action is not None:
            raise ReplayError(
                f"{self.name} has the action {action}, set by somebody else; a router has one replay at"
                " a time: call clear_router_replay_action()"
            )
        if self._replay.replay_backward_list:
            raise ReplayError(
                f"{self.name} holds {len(self._replay.replay_backward_list)} stale entries that no backward"
                " took, left by another replay; call clear_indices()"
            )

    def begin(self, routes: LayerRoutes, *, keeps: bool) -> None:
        """A forward begins, for which the router takes these routes.

        Args:
            routes: of this layer.
            keeps: whether a backward follows, which may recompute.
        """
        self._routes, self._keeps, self._has_run = routes, keeps, False

    def end(self) -> bool:
        """The forward is over; whether the router ran in it."""
        self._routes = None
        return self._has_run

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The live scores of the given ids, and the ids: called by the router.

        Args:
            scores: `[T, E]`, by which the router would choose.
            topk: K.
            num_groups: of group-limited routing.
            group_topk: of group-limited routing.
            default_compute_topk: the router's own choice.

        Returns:
            Scores and int64 ids, both `[T, K]`.

        Raises:
            ReplayError: the router has no routes for this run, or for another number of rows.
        """
        routes = self._recomputed() if _in_backward() else self._running()
        if tuple(routes.ids_TK.shape) != (len(scores), topk):
            raise ReplayError(
                f"{self.name} sees {len(scores)} rows and picks {topk}, the routes are of shape"
                f" {list(routes.ids_TK.shape)}; check sequence_parallel, context_parallel_size and the padding"
            )
        ids_TK = routes.ids_TK.to(scores.device)
        if routes.forced_T is not None:
            assert default_compute_topk is not None
            _, own_TK = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            ids_TK = torch.where(routes.forced_T.to(scores.device)[:, None], ids_TK, own_TK)
        return scores.gather(1, ids_TK), ids_TK

    def _running(self) -> LayerRoutes:
        if self._routes is None:
            raise ReplayError(
                f"{self.name} runs in a schedule, but outside of schedule.forward(chunk, rows), so it has"
                " no routes; a reference or evaluation pass belongs outside of the schedule"
            )
        if self._has_run:
            raise ReplayError(
                f"{self.name} runs a second time in one schedule.forward; open one for each micro-batch"
                " and chunk"
            )
        self._has_run = True
        # A checkpoint runs its layers without gradients; what runs with them will not run again.
        if self._keeps and not torch.is_grad_enabled():
            self._check_thread()
            mark = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            assert not self._marks or mark > self._marks[-1]
            self._marks.append(mark)
            self._kept[mark] = self._routes
        return self._routes

    def _check_thread(self) -> None:
        """Each thread numbers its autograd nodes for itself."""
        if threading.get_ident() != self._thread:
            raise ReplayError(
                f"{self.name} runs in another thread than the one that opened the schedule; with"
                " recomputation all forwards of a schedule run in its thread"
            )

    def _recomputed(self) -> LayerRoutes:
        node = torch._C._current_autograd_node()
        at = bisect_right(self._marks, node._sequence_nr())
        routes = self._kept.pop(self._marks[at], None) if at < len(self._marks) else None
        if routes is None:
            raise ReplayError(
                f"{self.name} is recomputed in backward, by {node.name()}, for a forward that this schedule"
                " has not kept or that was recomputed before; use megatron-core's own recomputation, and"
                " go forward and backward in the same schedule, once"
            )
        return routes


def _in_backward() -> bool:
    """Whether autograd runs this code, which then is a recomputation."""
    return torch._C._current_graph_task_id() != -1
