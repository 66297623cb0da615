"""The bridge between records and the routers of a megatron-core model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from routebook.errors import UncapturableError
from routebook.replay.megatron.router_tap import RouterTap
from routebook.replay.megatron.routers import find_taps
from routebook.replay.megatron.schedule import ReplaySchedule
from routebook.routes import RouteSchema


class RouterBridge:
    """Replays records in one model; other models of the process are not touched.

    Args:
        model: the model of this rank, or the list of its chunks (virtual pipeline), as forward steps get them.
        schema: of the records.

    Raises:
        UncapturableError: a router in which replay cannot hold; names the module and the option.
        ModelMismatchError: records of another model.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], schema: RouteSchema) -> None:
        self.schema = schema
        """Of the records."""
        self._chunks: dict[nn.Module, tuple[RouterTap, ...]] = {}
        for chunk in [model] if isinstance(model, nn.Module) else model:
            taken = {tap.layer_id for tap in self.taps}
            taps = tuple(find_taps(chunk, schema))
            twice = [tap for tap in taps if tap.layer_id in taken]
            if twice:
                raise UncapturableError(
                    f"two chunks have layer {twice[0].layer_id}, counted from 0; pass the chunks of one"
                    " model, each once"
                )
            self._chunks |= dict.fromkeys(_wrapped(chunk), taps)

    @property
    def taps(self) -> list[RouterTap]:
        """One for each router, chunk by chunk."""
        return list(dict.fromkeys(tap for taps in self._chunks.values() for tap in taps))

    @contextmanager
    def schedule(self) -> Iterator[ReplaySchedule]:
        """A run of forwards and backwards; at its end no routes are left, or it raises.

        Raises:
            ReplayError: somebody else uses the routers' `RouterReplay`, or a checkpointed forward was never
                recomputed.
        """
        with ExitStack() as attached:
            for tap in self.taps:
                tap.attach()
                attached.callback(tap.detach)
            schedule = ReplaySchedule(self.schema, self._chunks)
            attached.callback(schedule.close)
            yield schedule
            schedule.check_empty()


def _wrapped(chunk: nn.Module) -> list[nn.Module]:
    """The chunk and the modules that it wraps (`.module`), one in the other."""
    modules = [chunk]
    while isinstance(inner := getattr(modules[-1], "module", None), nn.Module):
        modules.append(inner)
    return modules
