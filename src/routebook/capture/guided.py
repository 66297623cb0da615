"""A router that takes given ids for some of its rows, whatever its family does to choose.

What a router is told and what it took goes through a `RouteGuide`, so that one mechanism serves replay and
recording. The family's own code computes the weights from the live scores, and the gradient with them.

Legend of shape suffixes: N = rows of the forward, E = experts, K = top-k, G = groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from routebook.capture.binding import RouterBinding
from routebook.capture.interception import ExpertTopK, Forward, TopK, topk_scores
from routebook.errors import UncapturableError


@dataclass(frozen=True, slots=True)
class GivenRows:
    """What one layer's router is told."""

    ids_NK: torch.Tensor
    """int64, on the router's device; rows that are not forced hold any ids of experts."""

    forced_N: torch.Tensor | None
    """bool: which rows are forced; None: all of them."""

    is_repeated: bool = False
    """Whether all ids are what these rows took before, those of rows that are not forced included."""

    def merged(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The given ids, and in rows that are free to choose what `own` chooses, `[N, K]`."""
        if self.forced_N is None or not self.needs_own:
            return self.ids_NK
        forced_N = torch.ones_like(self.forced_N) if self.is_repeated else self.forced_N
        return torch.where(forced_N[:, None], self.ids_NK, own())

    @property
    def needs_own(self) -> bool:
        """Whether the router's own choice is part of the computation.

        A compiled recomputation has to be the graph that the forward was, so that it saves the same tensors.
        """
        if self.forced_N is None:
            return False
        return not self.is_repeated or torch.compiler.is_compiling()


class RouteGuide(Protocol):
    """Tells one layer's router what to take, and hears what it took."""

    @property
    def keeps_own(self) -> bool:
        """Whether it wants to hear what the router would have taken, where that costs a top-k of its own."""

    def given(self, num_rows: int) -> GivenRows | None:
        """Called once per run of the router; None leaves the choice to it.

        Raises:
            RoutebookError: these rows must not run.
        """

    def took(self, ids_NK: torch.Tensor, own_ids_NK: torch.Tensor | None) -> None:
        """Called once per run with what was taken and, if known, the router's own choice."""


def guided(binding: RouterBinding, guide: RouteGuide) -> Callable[[Forward], Forward]:
    """Return a wrapper of the bound router's method that follows `guide`.

    Raises:
        UncapturableError: given experts could not get their weights from this router.
    """
    adapter = binding.adapter
    if adapter is not None and adapter.outputs is not None:
        if adapter.weights is None:
            raise UncapturableError(
                f"{binding.path} ({type(binding.module).__name__}) chooses without a top-k, and how it "
                "weighs a given choice is not known: it cannot be replayed"
            )
        return _guided_outputs(adapter.outputs, adapter.weights, guide)
    num_groups = _num_groups(binding)
    return _guided_topk(GuidedTopK(binding.num_experts, num_groups, guide))


def _num_groups(binding: RouterBinding) -> int | None:
    """Groups of a router whose scores outside of the chosen groups are zero; else None."""
    if getattr(binding.module, "topk_method", None) != "group_limited_greedy":
        return None
    num_groups: int = binding.module.num_group  # type: ignore[assignment]
    if num_groups == binding.num_experts:
        raise UncapturableError(
            f"{binding.path} ({type(binding.module).__name__}) has as many groups as experts, so that "
            "its two choices cannot be told apart"
        )
    return num_groups


class GuidedTopK(ExpertTopK):
    """Answers the expert top-k of one router and, where scores are masked by group, that of its groups."""

    def __init__(self, num_experts: int, num_groups: int | None, guide: RouteGuide) -> None:
        super().__init__(num_experts, self._answer)
        self._num_groups = num_groups
        self._guide = guide
        self._given: GivenRows | None = None
        self._is_told = False
        self._rehearsed_NK: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass everything through except the top-k over experts and, if there are any, groups."""
        if self._num_groups is not None and self._is_over_groups(func, args, kwargs or {}):
            return self._answer_groups(func(*args, **(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs)

    def run(self, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run the router's method `original` once."""
        self._given, self._is_told, self._rehearsed_NK = None, False, None
        if self._num_groups is not None and self._guide.keeps_own:
            self._rehearsed_NK = self._rehearse(original, args, kwargs)
        with self:
            return original(*args, **kwargs)

    def _rehearse(self, original: Forward, args: Any, kwargs: Any) -> torch.Tensor:
        """The router's own choice; once groups are given, its scores do not show it any more."""
        seen: list[torch.Tensor] = []

        def note(scores_NE: torch.Tensor, choose: Callable[[], TopK]) -> TopK:
            own = choose()
            seen.append(own[1])
            return own

        with torch.no_grad(), ExpertTopK(self.num_experts, note):
            original(*args, **kwargs)
        (own_ids_NK,) = seen
        return own_ids_NK

    def _tell(self, num_rows: int) -> GivenRows | None:
        if not self._is_told:
            self._given, self._is_told = self._guide.given(num_rows), True
        return self._given

    def _answer(self, scores_NE: torch.Tensor, choose: Callable[[], TopK]) -> TopK:
        given = self._tell(scores_NE.shape[0])
        if given is None:
            own = choose()
            self._guide.took(own[1], own[1])
            return own
        needs_own = given.needs_own or self._guide.keeps_own
        own_ids_NK = _own_ids(choose) if needs_own else None
        ids_NK = given.merged(lambda: _known(own_ids_NK))
        self._guide.took(ids_NK, own_ids_NK if self._rehearsed_NK is None else self._rehearsed_NK)
        # A fresh gather: some routers normalise the values in place.
        result: TopK = torch.return_types.topk((scores_NE.gather(-1, ids_NK), ids_NK))
        return result

    def _is_over_groups(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        scores_NG = topk_scores(func, args, kwargs)
        return scores_NG is not None and scores_NG.shape[-1] == self._num_groups

    def _answer_groups(self, own: TopK) -> TopK:
        """The groups of the given experts: scores outside of the answered groups become zero.

        The ids are only scattered into a mask, so that repeated ones and another number of them do no harm.
        """
        own_NG = own[1]
        given = self._tell(own_NG.shape[0])
        if given is None:
            return own
        assert self._num_groups is not None
        groups_NK = given.ids_NK // (self.num_experts // self._num_groups)
        if given.needs_own:
            width = max(groups_NK.shape[-1], own_NG.shape[-1])
            groups_NK, own_NG = _widened(groups_NK, width), _widened(own_NG, width)
            groups = GivenRows(groups_NK, given.forced_N, given.is_repeated)
            groups_NK = groups.merged(lambda: own_NG)
        result: TopK = torch.return_types.topk((own[0], groups_NK))
        return result


def _guided_topk(mode: GuidedTopK) -> Callable[[Forward], Forward]:
    def wrap(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return mode.run(original, args, kwargs)

        return forward

    return wrap


def _guided_outputs(
    places: tuple[int, int],
    weights: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    guide: RouteGuide,
) -> Callable[[Forward], Forward]:
    """For a router without a top-k: its output is answered with other ids and their weights."""
    scores_place, ids_place = places

    def wrap(original: Forward) -> Forward:
        router = getattr(original, "__self__", None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = list(original(*args, **kwargs))
            scores_NE, own_ids_NK = output[scores_place], output[ids_place]
            given = guide.given(scores_NE.shape[0])
            if given is None:
                guide.took(own_ids_NK, own_ids_NK)
                return tuple(output)
            ids_NK = given.merged(lambda: own_ids_NK)
            guide.took(ids_NK, own_ids_NK)
            given_weights_NK = weights(_known(router), scores_NE, ids_NK)
            (weights_place,) = {0, 1, 2} - {scores_place, ids_place}
            if given.forced_N is not None:
                # A row of the live router keeps the weights that came with its choice; it may have drawn them.
                given_weights_NK = torch.where(
                    given.forced_N[:, None], given_weights_NK, output[weights_place]
                )
            output[weights_place], output[ids_place] = given_weights_NK, ids_NK
            return tuple(output)

        return forward

    return wrap


def _own_ids(choose: Callable[[], TopK]) -> torch.Tensor:
    # Without a node of autograd, a recomputation that knows the ids has no tensor less to save.
    with torch.no_grad():
        return choose()[1]


def _known(value: Any) -> Any:
    assert value is not None
    return value


def _widened(ids_NG: torch.Tensor, width: int) -> torch.Tensor:
    """Ids `[N, width]`, the first one repeated."""
    missing = width - ids_NG.shape[-1]
    return torch.cat([ids_NG, ids_NG[:, :1].expand(-1, missing)], dim=-1)
