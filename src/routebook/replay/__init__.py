"""The trainer's side: forward passes that take the routes of a record, and how much that helps."""

from routebook.replay.batch import RouteBatch, Routes
from routebook.replay.drift import measure_drift
from routebook.replay.drift_report import DriftReport
from routebook.replay.forward import RoutedForward
from routebook.replay.record import record
from routebook.replay.sequences import Sequences
from routebook.replay.session import RouteSession, replay

__all__ = [
    "DriftReport",
    "RouteBatch",
    "RouteSession",
    "RoutedForward",
    "Routes",
    "Sequences",
    "measure_drift",
    "record",
    "replay",
]
