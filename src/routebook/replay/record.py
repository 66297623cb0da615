"""Recording a trainer's own choice (R2), with the session that also replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from routebook.replay.forward import RoutedForward
from routebook.replay.session import bound


@contextmanager
def record(model: nn.Module) -> Iterator[list[RoutedForward]]:
    """Note what the routers take in the forward passes inside; see :meth:`RouteSession.recording`.

    A model that has no session gets one for the block.

    Returns:
        A context that gives a list with one entry per forward; `[-1].records()` are the rows of the last one.

    Raises:
        RoutebookError: as :class:`RouteSession` and :meth:`RouteSession.recording`.
    """
    with bound(model) as session, session.recording() as forwards:
        yield forwards
