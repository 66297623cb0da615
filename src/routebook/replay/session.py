"""Replay and recording on one transformers model.

A session belongs to one model: it binds the routers that take part in the model's forward, each by its decoder layer,
and nothing outside of the model knows of it. A decoder that was built but is never run has no part in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn

from routebook.capture.binding import RouterBinding, bind_routers, decoder_layer
from routebook.capture.blocks import Run, describe, dry_run
from routebook.capture.guided import guided
from routebook.capture.interception import RouterTap, is_tapped
from routebook.errors import CaptureError, ReplayError
from routebook.replay.batch import RouteBatch, Routes
from routebook.replay.forward import RoutedForward
from routebook.replay.layer_slot import CallPoint, LayerSlot, call_points, slot_of
from routebook.replay.sequences import ModelCall

_OUTER = ("module", "_orig_mod")
"""Where wrappers of a whole model keep it: DistributedDataParallel and torch.compile."""


@dataclass(slots=True)
class _Task:
    """What the forwards inside of one `forward` or `recording` do."""

    routes: Routes | None
    keeps_own: bool
    finished: list[RoutedForward] = field(default_factory=list)


class RouteSession:
    """The routers of one model, bound until `close`; outside of `forward` and `recording` the model runs as before.

    Args:
        model: a causal language model of transformers, in training or evaluation mode, whole or wrapped layer by layer
            (FSDP2, tensor parallel, checkpoint wrappers). With several processes, all of them bind together, because
            binding runs a small forward pass.
        run: runs that forward pass; by default a few token ids without a KV cache.

    Raises:
        DenseModelError: the model has no MoE layer.
        UncapturableError: a router cannot be captured or steered; the message names it and the reason.
        CaptureError: the model is bound already.
    """

    def __init__(self, model: nn.Module, run: Run | None = None) -> None:
        self.model = model
        """The model as it was given."""
        inner = _inner(model)
        _refuse_bound(inner)
        with _in_evaluation(inner):
            self.bindings, self.schema = bind_routers(inner, run or dry_run)
        self._owner = _owner(inner, self.bindings[0])
        self._running: RoutedForward | None = None
        self._is_running = False
        self._task: _Task | None = None
        self._is_closed = False
        self._slots: list[LayerSlot] = []
        self._removers: list[Callable[[], None]] = []
        try:
            for index, binding in enumerate(self.bindings):
                self._attach(inner, index, binding)
            self._watch_owner()
        except BaseException:
            self._remove()
            raise

    def forward(
        self, routes: Routes, *, keep_own: bool = False
    ) -> AbstractContextManager[list[RoutedForward]]:
        """Replay `routes` in the forward passes of the model that run inside: one, or several over the same tokens.

        Backward may come later, in any order with other forwards; layers that it recomputes take the ids that they
        took here.

        Args:
            routes: one record per sequence of the batch (None where there is none), a :class:`RouteBatch`, or ids
                `[N, L, K]` or `[B, S, L, K]` with -1 in rows without a route. Records are placed by the attention
                mask (padded batches) or by `cu_seq_lens_q` or `position_ids` (packed ones) that the model is called
                with, and checked against its `input_ids`.
            keep_own: also note what the live routers would have taken, see `RoutedForward.own_topk_ids`.

        Returns:
            A context that gives a list, to which each forward is added when it has finished.

        Raises:
            ReplayError: no forward ran inside, a layer did not consume its rows, or consumed them twice.
            RecordError: the routes do not fit the model or the batch.
        """
        return self._doing(_Task(routes=routes, keeps_own=keep_own))

    def recording(self) -> AbstractContextManager[list[RoutedForward]]:
        """Note what the routers take in the forward passes that run inside.

        Returns:
            A context that gives a list, to which each forward is added when it has finished.

        Raises:
            ReplayError: no forward ran inside, or a layer's router did not run.
        """
        return self._doing(_Task(routes=None, keeps_own=False))

    def close(self) -> None:
        """Leave the model as it was found, as soon as no backward can need the session any more.

        What was checkpointed keeps its routes: the model is then restored by the next forward or session.
        """
        self._is_closed = True
        self._remove_if_done()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def reopen(self) -> None:
        """Use a closed session whose model could not be restored yet."""
        self._is_closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of the model is another model: its hooks find no session.
        return None

    @contextmanager
    def _doing(self, task: _Task) -> Iterator[list[RoutedForward]]:
        if self._is_closed:
            raise ReplayError("the session is closed; make a new one")
        if self._task is not None:
            raise ReplayError("another forward of this session is open; leave it first")
        self._task = task
        try:
            yield task.finished
        finally:
            self._task = None
        if not task.finished:
            raise ReplayError(
                "no forward of the model ran, so that no row was consumed; call the model that the session has "
                "bound, inside of the with block"
            )

    def _attach(self, model: nn.Module, index: int, binding: RouterBinding) -> None:
        layer = decoder_layer(model, binding.path)
        assert layer is not None
        entry = f"{layer.list_path}.{layer.layer_id}"
        slot = LayerSlot(index, describe(model, entry), lambda: (self._running, self._is_running))
        method = binding.adapter.method if binding.adapter else "forward"
        tap = RouterTap(binding.module, slot, guided(binding, slot), method)
        self._removers.append(tap.remove)
        for module in call_points(model, entry, binding.path):
            self._removers.append(CallPoint(module, slot).remove)
        self._slots.append(slot)

    def _watch_owner(self) -> None:
        watch = _OwnerWatch(self)
        handles = [
            self._owner.register_forward_pre_hook(watch.enter, prepend=True, with_kwargs=True),
            self._owner.register_forward_hook(watch.leave),
            self._owner.register_forward_hook(watch.after, always_call=True),
        ]
        self._removers += [handle.remove for handle in handles]
        self._owner.__dict__[_SESSION] = self
        self._removers.append(lambda: self._owner.__dict__.pop(_SESSION, None))

    def _remove_if_done(self) -> None:
        if not any(slot.is_bound for slot in self._slots):
            self._remove()

    def _remove(self) -> None:
        for slot in self._slots:
            slot.detach()
        while self._removers:
            self._removers.pop()()


_SESSION = "_routebook_session"


_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _not_compiled(hook: _Hook) -> _Hook:
    reason = (
        "routes are placed outside of any graph: compile the layers, or the model without fullgraph"
    )
    disabled: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


class _OwnerWatch:
    """Begins and ends a routed forward with each forward of the module that owns the decoder layers."""

    def __init__(self, session: RouteSession | None) -> None:
        self._session = session

    @_not_compiled
    def enter(self, owner: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        session = self._session
        if session is None:
            return
        if session._is_closed:
            session._remove_if_done()
            return
        if torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                f"the whole decoder ({type(owner).__name__}) is recomputed in backward, where it cannot be told "
                "which routes it takes; checkpoint its layers with model.gradient_checkpointing_enable()"
            )
        session._running, session._is_running = None, True
        if session._task is not None:
            session._running = _routed_forward(session, owner, args, kwargs, session._task)

    @_not_compiled
    def leave(self, owner: nn.Module, args: Any, output: Any) -> None:
        session = self._session
        if session is not None and session._running is not None and session._task is not None:
            session._running.finish()
            session._task.finished.append(session._running)

    def after(self, owner: nn.Module, args: Any, output: Any) -> None:
        if self._session is not None:
            self._session._running, self._session._is_running = None, False


def session_of(model: nn.Module) -> RouteSession | None:
    """The session that has bound this model, if there is one."""
    for module in _inner(model).modules():
        session: RouteSession | None = module.__dict__.get(_SESSION)
        if session is not None and session._owner is module:
            return session
    return None


@contextmanager
def replay(model: nn.Module, routes: Routes) -> Iterator[RouteSession]:
    """Run the forward passes inside along `routes`; see :meth:`RouteSession.forward`.

    A model that has no session gets one for the block. Binding costs a small forward pass, so a training loop keeps a
    :class:`RouteSession` of its own.

    Raises:
        RoutebookError: as :class:`RouteSession` and :meth:`RouteSession.forward`.
    """
    with bound(model) as session, session.forward(routes):
        yield session


@contextmanager
def bound(model: nn.Module) -> Iterator[RouteSession]:
    """The model's own session, or one for the block."""
    session = session_of(model)
    if session is not None and not session.is_closed:
        yield session
        return
    if session is None:
        session = RouteSession(model)
    else:
        session.reopen()
    try:
        yield session
    finally:
        session.close()


def _routed_forward(
    session: RouteSession, owner: nn.Module, args: Any, kwargs: dict[str, Any], task: _Task
) -> RoutedForward:
    arguments = signature(type(owner).forward).bind_partial(owner, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    call = ModelCall.of_arguments(arguments)
    batch = None
    if task.routes is not None:
        batch = RouteBatch.of_call(task.routes, call, session.schema)
        batch = batch.to(next(owner.parameters()).device)
    return RoutedForward(session.schema, call, batch, task.keeps_own)


def _owner(model: nn.Module, binding: RouterBinding) -> nn.Module:
    """The module whose forward runs the decoder layers."""
    layer = decoder_layer(model, binding.path)
    assert layer is not None
    return model.get_submodule(layer.list_path.rpartition(".")[0])


def _inner(model: nn.Module) -> nn.Module:
    """The model inside of wrappers that take whole models."""
    for name in _OUTER:
        inner = model._modules.get(name)
        if inner is not None and not hasattr(model, "get_input_embeddings"):
            return _inner(inner)
    return model


def _refuse_bound(model: nn.Module) -> None:
    session = session_of(model)
    if session is not None and session.is_closed:
        session._remove_if_done()
    for path, module in model.named_modules():
        slot = slot_of(module)
        if is_tapped(module) or (slot is not None and slot.is_attached):
            raise CaptureError(
                f"{describe(model, path)} is bound already; close what has bound it first, and run the backward "
                "passes that it still has to steer"
            )


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Bind in evaluation mode: some routers sample in training, and dropout would change what is seen."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # Checkpoint wrappers say so of a forward without gradient.
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            yield
    finally:
        for module in training:
            module.training = True
