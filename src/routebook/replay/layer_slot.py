"""How one decoder layer learns which forward pass a run of it belongs to, in backward too.

Gradient checkpointing runs a layer again in backward, when other micro-batches may have gone through it since. So the
forward that a run belongs to travels as a keyword argument of the layer: whoever recomputes the layer keeps its
arguments. The argument is added where the layer is called and taken away before its own code sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from routebook.capture.guided import GivenRows
from routebook.errors import ReplayError
from routebook.replay.forward import RoutedForward

_KEYWORD = "_routebook_call"
_SLOT = "_routebook_slot"
_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Where modules that wrap one other keep it."""


class LayerCall:
    """One run of one layer in one forward, and its recomputations; `forward` is None where nothing is steered."""

    __slots__ = ("__weakref__", "forward")

    def __init__(self, forward: RoutedForward | None) -> None:
        self.forward = forward


class LayerSlot:
    """The call that a decoder layer is running now: the switch of its router's tap, and its guide.

    Args:
        index: place on the schema's layer axis.
        name: the layer, for messages.
        running: the forward that the model is running now; `(None, False)` outside of any.
    """

    def __init__(
        self, index: int, name: str, running: Callable[[], tuple[RoutedForward | None, bool]]
    ) -> None:
        self.index = index
        self.name = name
        self._running = running
        self.is_attached = True
        """Whether a session still steers it."""
        self._entered: list[LayerCall | None] = []
        self._calls: weakref.WeakSet[LayerCall] = weakref.WeakSet()

    @property
    def on(self) -> bool:
        """Whether the router runs for a forward of the session.

        Raises:
            ReplayError: it is recomputed in backward, and nothing says for which forward.
        """
        call = self._call
        if call is not None:
            return call.forward is not None
        if self.is_attached and _in_backward():
            raise ReplayError(
                f"{self.name} is recomputed in backward by something that does not keep the layer's arguments, "
                "so that it cannot be told which routes it takes; checkpoint whole layers with "
                "model.gradient_checkpointing_enable() or torch's checkpoint_wrapper"
            )
        return False

    @property
    def keeps_own(self) -> bool:
        """See `RouteGuide`."""
        return self._forward.is_open and self._forward.keeps_own

    @property
    def is_bound(self) -> bool:
        """Whether somebody may still recompute a run of this layer."""
        return len(self._calls) > 0

    def given(self, num_rows: int) -> GivenRows | None:
        """See `RouteGuide`."""
        return self._forward.given(self.index, num_rows)

    def took(self, ids_NK: torch.Tensor, own_ids_NK: torch.Tensor | None) -> None:
        """See `RouteGuide`."""
        self._forward.took(self.index, ids_NK, own_ids_NK)

    def open_call(self) -> LayerCall | None:
        """The call that begins now, or the one around it; None outside of the model's forward."""
        if self._call is not None or not self.is_attached:
            return self._call
        forward, is_running = self._running()
        if not is_running:
            return None
        call = LayerCall(forward)
        if forward is not None:
            self._calls.add(call)
        return call

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward-pre-hook: take the call out of the arguments."""
        self._entered.append(kwargs.get(_KEYWORD))
        if _KEYWORD not in kwargs:
            return None
        return args, {name: value for name, value in kwargs.items() if name != _KEYWORD}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward-hook that always runs: the call has ended."""
        if self._entered:
            self._entered.pop()

    def detach(self) -> None:
        """Let go of the session; what still runs with this slot runs natively."""
        self.is_attached = False
        self._entered.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSlot:
        # A copy of the model is another model: no session has bound it.
        slot = LayerSlot(self.index, self.name, _nothing_runs)
        slot.detach()
        return slot

    @property
    def _call(self) -> LayerCall | None:
        return self._entered[-1] if self._entered else None

    @property
    def _forward(self) -> RoutedForward:
        call = self._call
        assert call is not None
        assert call.forward is not None
        return call.forward


class CallPoint:
    """Adds a layer's call to the arguments of one module, until `remove`.

    The module's class becomes a subclass of itself: the argument has to be there before the `__call__` of its class
    runs, in which transformers decides to checkpoint.

    Args:
        module: the decoder layer, or whatever wraps it or a part of it for recomputation.
        slot: the layer's slot.
    """

    def __init__(self, module: nn.Module, slot: LayerSlot) -> None:
        self._module = module
        self._plain_class = type(module)
        self._adding_class = _adding_class(self._plain_class)
        receiver = unwrapped(module)
        self._handles = [
            receiver.register_forward_pre_hook(slot.enter, prepend=True, with_kwargs=True),
            receiver.register_forward_hook(slot.leave, always_call=True),
        ]
        module.__dict__[_SLOT] = slot
        module.__class__ = self._adding_class

    def remove(self) -> None:
        """Put the module back as it was found; a class that somebody changed since stays and does nothing."""
        for handle in self._handles:
            handle.remove()
        if type(self._module) is self._adding_class:
            self._module.__class__ = self._plain_class
        self._module.__dict__.pop(_SLOT, None)


def call_points(root: nn.Module, entry: str, router: str) -> list[nn.Module]:
    """Modules whose calls must carry the layer's call for the router at path `router` to be told in backward.

    Args:
        root: the model.
        entry: path of the decoder layer's entry in the list of layers.
        router: path of its router.
    """
    points = [root.get_submodule(entry)]
    inside = unwrapped(points[0])
    path = entry
    for name in router[len(entry) + 1 :].split("."):
        path = f"{path}.{name}"
        module = root.get_submodule(path)
        if inside in module.modules():
            continue  # still a wrapper of the point before
        if type(module).__name__ == "CheckpointWrapper":
            points.append(module)
            inside = unwrapped(module)
    return points


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers that hand their arguments on."""
    for name in _WRAPPED:
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return module


def slot_of(module: nn.Module) -> LayerSlot | None:
    """The slot of a module that is a call point."""
    slot: LayerSlot | None = module.__dict__.get(_SLOT)
    return slot


def _adding_class(plain: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(self)
        bound = slot.open_call() if slot is not None else None
        if bound is not None:
            kwargs[_KEYWORD] = bound
        return plain.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (plain,), names)


def _in_backward() -> bool:
    """Whether autograd runs this code, which then is a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _nothing_runs() -> tuple[None, bool]:
    return None, False
