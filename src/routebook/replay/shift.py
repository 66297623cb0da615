"""Do the rows of a record lie where they belong? If not: by how many rows or layers are they off, and where?

The judge is the model's own choice on the same tokens. It need not be equal to the record, since another number format
routes some tokens differently; but rows in a wrong place agree with it no better than by chance.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k, E = experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from routebook.routes import RoutedExperts

Ids = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]

MAX_OFFSET = 2
OFFSETS = range(-MAX_OFFSET, MAX_OFFSET + 1)
_CLEARLY = 0.1
"""By how much another place must fit better, as a share of the picks."""
_MISFIT = 0.25
"""A row that agrees less than this on the way from chance (0) to equality (1) does not belong to its place."""
_MIN_RUN = 3
"""Fewer rows in a line can disagree, or be equal, by chance."""


class Shift(msgspec.Struct, frozen=True, kw_only=True, tag="shift"):
    """All rows, or a run of them, lie in a wrong place."""

    text: str
    rows: int
    """Row `t` of the record holds the choice of position `t + rows`."""
    layers: int
    """Entry `l` of its layer axis holds the choice of entry `l + layers`."""


class Dummies(msgspec.Struct, frozen=True, kw_only=True, tag="dummies"):
    """Rows at positions `[start, stop)` that no router chose, put there to fill a gap."""

    text: str
    start: int
    stop: int


class Strangers(msgspec.Struct, frozen=True, kw_only=True, tag="strangers"):
    """Rows that fit nowhere near their place: of another model, or of other tokens."""

    text: str


Fault = Shift | Dummies | Strangers
"""Rows that do not belong where they lie; `text` says which, for people."""


@dataclass(slots=True)
class PlaceFinder:
    """Sums up how well records fit the model's choice at every small offset of rows and layers."""

    top_k: int
    num_experts: int
    hits: dict[tuple[int, int], int] = field(default_factory=dict)
    picks: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, ids_TLK: Ids, own_TLK: Ids, valid_T: Mask) -> None:
        """Take in the rows of one record and the model's own choice at the same positions.

        Args:
            ids_TLK: recorded ids; rows that are not valid hold anything.
            own_TLK: what the model chooses.
            valid_T: which rows exist.
        """
        for rows in OFFSETS:
            for layers in OFFSETS:
                overlap_TL = _overlap_at(ids_TLK, own_TLK, valid_T, rows, layers)
                place = rows, layers
                self.hits[place] = self.hits.get(place, 0) + int(overlap_TL.sum())
                self.picks[place] = self.picks.get(place, 0) + overlap_TL.size * self.top_k

    def share(self, rows: int, layers: int) -> float:
        """Share of recorded picks that the model makes as well, at this offset; 0 where nothing overlaps."""
        picks = self.picks.get((rows, layers), 0)
        return self.hits[rows, layers] / picks if picks else 0.0

    @property
    def chance(self) -> float:
        """Share of picks that unrelated choices have in common."""
        return self.top_k / self.num_experts

    def fault(self, what: str = "the rows") -> Shift | Strangers | None:
        """Name the offset at which the rows fit clearly better than where they lie."""
        places = [(rows, layers) for rows in OFFSETS for layers in OFFSETS]
        rows, layers = max(places, key=lambda place: self.share(*place))
        here, best = self.share(0, 0), self.share(rows, layers)
        if best > here + _CLEARLY and best > self._misfit:
            return Shift(text=_shift_text(what, rows, layers, best, here), rows=rows, layers=layers)
        if self.picks.get((0, 0)) and here < self._misfit:
            text = (
                f"{what} agree with the model in {here:.0%} of the picks (chance is {self.chance:.0%}) and fit "
                "no better elsewhere: they are of another model, or of other tokens"
            )
            return Strangers(text=text)
        return None

    @property
    def _misfit(self) -> float:
        return self.chance + _MISFIT * (1 - self.chance)


def row_faults(name: str, record: RoutedExperts, own_TLK: Ids) -> Iterator[Fault]:
    """Runs of rows within one record that do not belong there, though the record as a whole does.

    Args:
        name: the record, for the text.
        record: its rows.
        own_TLK: the model's choice at the same positions.
    """
    dummy_T = _dummies(record)
    for start, stop in _runs(dummy_T, 1):
        yield Dummies(
            text=f"{name}: rows [{start + record.start}, {stop + record.start}) are dummies, not choices of a "
            f"router (ids {record.ids_TLK[start, 0].tolist()} in the first layer)",
            start=start + record.start,
            stop=stop + record.start,
        )
    finder = PlaceFinder(top_k=record.schema.top_k, num_experts=record.schema.num_experts)
    overlap_T = _overlap_at(record.ids_TLK, own_TLK, np.ones_like(dummy_T), 0, 0).mean(axis=1)
    misfit_T = overlap_T / finder.top_k < finder._misfit
    for start, stop in _runs(misfit_T & record.valid_T & ~dummy_T, _MIN_RUN):
        yield _misfit_fault(name, record, own_TLK, start, stop)


def duplicates(record: RoutedExperts) -> Mask:
    """bool `[T]`: valid rows that name an expert twice in a layer, which no router does."""
    sorted_TLK = np.sort(record.ids_TLK, axis=2)
    twice_T: Mask = (sorted_TLK[:, :, 1:] == sorted_TLK[:, :, :-1]).any(axis=(1, 2))
    return twice_T & record.valid_T


def _misfit_fault(
    name: str, record: RoutedExperts, own_TLK: Ids, start: int, stop: int
) -> Shift | Strangers:
    inside_T = np.zeros(record.num_rows, np.bool_)
    inside_T[start:stop] = True
    finder = PlaceFinder(top_k=record.schema.top_k, num_experts=record.schema.num_experts)
    finder.add(record.ids_TLK, own_TLK, inside_T)
    fault = finder.fault(f"{name}: rows [{start + record.start}, {stop + record.start})")
    assert fault is not None, "a run of misfits fits"
    return fault


def _dummies(record: RoutedExperts) -> Mask:
    """Rows of zeros or of 0, 1, 2, ..., the same in every layer, and runs of rows that are copies of each other."""
    ids_TLK, valid_T = record.ids_TLK, record.valid_T
    counting_T = (ids_TLK == np.arange(record.schema.top_k)).all(axis=(1, 2))
    zero_T = (ids_TLK == 0).all(axis=(1, 2))
    same_as_before_T = np.zeros(len(ids_TLK), np.bool_)
    same_as_before_T[1:] = (
        (ids_TLK[1:] == ids_TLK[:-1]).all(axis=(1, 2)) & valid_T[1:] & valid_T[:-1]
    )
    dummy_T: Mask = (counting_T | zero_T | duplicates(record)) & valid_T
    for start, stop in _runs(same_as_before_T, _MIN_RUN - 1):
        dummy_T[start - 1 : stop] = True
    return dummy_T


def _overlap_at(
    ids_TLK: Ids, own_TLK: Ids, valid_T: Mask, rows: int, layers: int
) -> npt.NDArray[np.int64]:
    """Picks in common of record entry (t, l) and the model's (t + rows, l + layers), for the pairs that exist."""
    num_rows, num_layers, _ = ids_TLK.shape
    mine, theirs = _shifted(num_rows, rows)
    my_layers, their_layers = _shifted(num_layers, layers)
    chosen_TLK = ids_TLK[mine, my_layers][valid_T[mine]]
    own = own_TLK[theirs, their_layers][valid_T[mine]]
    common: npt.NDArray[np.int64] = (chosen_TLK[..., :, None] == own[..., None, :]).any(-1).sum(-1)
    return common


def _shifted(size: int, by: int) -> tuple[slice, slice]:
    """Places `i` for which `i + by` exists, and those."""
    start, stop = max(0, -by), max(0, size - max(0, by))
    return slice(start, max(start, stop)), slice(start + by, max(start, stop) + by)


def _runs(mask_T: Mask, shortest: int) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask_T, [False]]).astype(np.int8)))
    for start, stop in edges.reshape(-1, 2).tolist():
        if stop - start >= shortest:
            yield start, stop


def _shift_text(what: str, rows: int, layers: int, best: float, here: float) -> str:
    parts = []
    if rows:
        parts.append(f"by {rows:+d} rows (row t holds the choice of position t{rows:+d})")
    if layers:
        parts.append(
            f"by {layers:+d} layers (entry l of the layer axis holds that of l{layers:+d})"
        )
    return (
        f"{what} are shifted {' and '.join(parts)}: there they agree with the model in {best:.0%} of the picks, "
        f"where they lie in {here:.0%}"
    )
