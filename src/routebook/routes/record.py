"""The record: which experts were chosen in every MoE layer, for a span of one sequence's positions.

Row `t` is the choice made while the token at position `t` was the input of a forward pass. All
arithmetic on spans (slice, concat, append, truncate, pad) lives in this one class and refuses what
does not fit: nothing is realigned, cut or filled in silence.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from routebook.errors import RecordError, SchemaMismatchError, SpanError, TokenMismatchError
from routebook.routes.provenance import (
    ABSENT,
    Origin,
    Provenance,
    clip_provenance,
    merge_provenance,
    provenance_of_rows,
    rows_of_provenance,
)
from routebook.routes.schema import RouteSchema
from routebook.routes.token_check import check_row_tokens
from routebook.routes.token_hash import Hashes, TokenIds, as_token_ids, token_hashes

RouteIds = npt.NDArray[np.unsignedinteger]
Mask = npt.NDArray[np.bool_]

_HASHES = 2**32
_MAX_POSITION = 2**32


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RoutedExperts:
    """Rows `[start, start + T)` of one sequence, checked when made and never changed after.

    Arrays are kept as read-only views of what was given, without a copy where the content allows
    it; who hands over an array does not write to it any more. Two records are equal when schema,
    span, validity, ids of valid rows, provenance and hashes are equal.

    That a row's ids are distinct is *not* checked when a record is made: it costs a hundred times
    the range check, and a decoder should cost less than its bytes. See :meth:`check_distinct`.

    Raises:
        SchemaMismatchError: ids of another dtype or shape, or an id that no expert has.
        SpanError: a negative start, arrays of different lengths, or provenance that does not cover
            exactly the valid rows.
        TokenMismatchError: a prefix hash that cannot be.
    """

    schema: RouteSchema
    """What the axes mean."""

    ids_TLK: RouteIds
    """Logical expert ids `[T, L, K]` in the schema's dtype; absent rows hold `schema.absent`."""

    start: int
    """Position of the first row."""

    valid_T: Mask
    """bool `[T]`: which rows exist. The others are absent, whatever their ids look like."""

    provenance: tuple[Provenance, ...]
    """Where the valid rows came from: ascending, disjoint, each range as long as it can be."""

    prefix_hash: int
    """Hash of all tokens before `start`; 0 if there are none."""

    token_hash_T: Hashes
    """uint32 `[T]`: hash of the tokens `0..t`, for absent rows too."""

    def __post_init__(self) -> None:
        self._check_axes()
        self._settle("valid_T", _read_only(self.valid_T))
        self._settle("token_hash_T", _read_only(self.token_hash_T))
        self._settle("ids_TLK", _read_only(_absent_filled(self)))
        self._settle("provenance", merge_provenance(self.provenance))
        self._check_ids()
        self._check_provenance()
        self._check_prefix()

    @classmethod
    def from_rows(
        cls,
        schema: RouteSchema,
        ids_TLK: RouteIds,
        token_ids: TokenIds,
        start: int = 0,
        *,
        origin_T: npt.NDArray[np.uint8] | None = None,
        version_T: npt.NDArray[np.uint32] | int = 0,
    ) -> RoutedExperts:
        """Make a record from rows and the sequence that they belong to.

        Args:
            schema: what the axes mean.
            ids_TLK: `[T, L, K]` in `schema.dtype`; the content of absent rows does not matter.
            token_ids: all tokens from position 0 on, at least `start + T`; the last sampled token
                of a sequence has no row, so one more is usual.
            start: position of the first row.
            origin_T: uint8 `[T]`, an :class:`Origin` per row, `ABSENT` where there is none. Without
                it every row is valid and counts as `PREFILL`: one forward over known tokens.
            version_T: uint32 `[T]`, the weight version of each row, or one for all.

        Raises:
            RecordError: what the class itself refuses, or fewer tokens than rows.
        """
        num_rows = len(ids_TLK)
        if origin_T is None:
            origin_T = np.full(num_rows, Origin.PREFILL, np.uint8)
        versions_T = np.broadcast_to(_as_versions(version_T), origin_T.shape)
        tokens_T = as_token_ids(token_ids)
        if start < 0 or len(tokens_T) < start + num_rows:
            raise TokenMismatchError(
                f"rows [{start}, {start + num_rows}) need the tokens of all positions before their "
                f"end, but {len(tokens_T)} were given; pass prompt and completion together"
            )
        hashes_T = token_hashes(tokens_T[: start + num_rows])
        return cls(
            schema=schema,
            ids_TLK=ids_TLK,
            start=start,
            valid_T=origin_T != ABSENT,
            provenance=provenance_of_rows(origin_T, versions_T, start),
            prefix_hash=int(hashes_T[start - 1]) if start else 0,
            token_hash_T=hashes_T[start:],
        )

    @property
    def num_rows(self) -> int:
        """Rows of the span, absent ones included."""
        return len(self.ids_TLK)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def complete(self) -> bool:
        """Whether every row is valid."""
        return bool(self.valid_T.all())

    @property
    def last_hash(self) -> int:
        """Hash of all tokens before `stop`: the `prefix_hash` of what may follow."""
        return int(self.token_hash_T[-1]) if self.num_rows else self.prefix_hash

    def slice(self, start: int, stop: int) -> RoutedExperts:
        """The rows at positions `[start, stop)`, as views.

        Raises:
            SpanError: the span does not lie within the record.
        """
        if not self.start <= start <= stop <= self.stop:
            raise SpanError(
                f"positions [{start}, {stop}) do not lie within the record's "
                f"[{self.start}, {self.stop})"
            )
        rows = np.s_[start - self.start : stop - self.start]
        before = start - self.start - 1
        return replace(
            self,
            ids_TLK=self.ids_TLK[rows],
            start=start,
            valid_T=self.valid_T[rows],
            provenance=clip_provenance(self.provenance, start, stop),
            prefix_hash=int(self.token_hash_T[before]) if before >= 0 else self.prefix_hash,
            token_hash_T=self.token_hash_T[rows],
        )

    def truncate(self, stop: int) -> RoutedExperts:
        """The rows before position `stop`.

        Raises:
            SpanError: `stop` does not lie within the record.
        """
        return self.slice(self.start, stop)

    def append(self, other: RoutedExperts) -> RoutedExperts:
        """This record followed by `other`, such as the next turn; see :meth:`concat` for many.

        Raises:
            RecordError: as :meth:`concat`.
        """
        return self.concat([self, other])

    @classmethod
    def concat(cls, records: Sequence[RoutedExperts]) -> RoutedExperts:
        """Join spans that follow each other, in one copy.

        Raises:
            SchemaMismatchError: the schemas differ.
            SpanError: a span does not begin where the one before ends, or there is none at all.
            TokenMismatchError: a span follows other tokens than those of the spans before.
        """
        if not records:
            raise SpanError("no records to join; pass at least one")
        for index, (a, b) in enumerate(pairwise(records), 1):
            _check_follows(a, b, index)
        return cls(
            schema=records[0].schema,
            ids_TLK=np.concatenate([record.ids_TLK for record in records]),
            start=records[0].start,
            valid_T=np.concatenate([record.valid_T for record in records]),
            provenance=tuple(span for record in records for span in record.provenance),
            prefix_hash=records[0].prefix_hash,
            token_hash_T=np.concatenate([record.token_hash_T for record in records]),
        )

    def pad(self, token_ids: TokenIds) -> RoutedExperts:
        """Extend the span to `len(token_ids)` with absent rows.

        Args:
            token_ids: all tokens from position 0 on; they begin with those of the record.

        Raises:
            SpanError: the record is longer than the tokens.
            TokenMismatchError: the rows were computed for other tokens.
        """
        tokens_T = as_token_ids(token_ids)
        num_absent = len(tokens_T) - self.stop
        if num_absent < 0:
            raise SpanError(
                f"a record that ends at position {self.stop} cannot be padded to "
                f"{len(tokens_T)} tokens; truncate it instead"
            )
        self.check_tokens(tokens_T)
        tail = RoutedExperts(
            schema=self.schema,
            ids_TLK=np.full(self.schema.shape(num_absent), self.schema.absent, self.schema.dtype),
            start=self.stop,
            valid_T=np.zeros(num_absent, np.bool_),
            provenance=(),
            prefix_hash=self.last_hash,
            token_hash_T=token_hashes(tokens_T[self.stop :], self.stop, self.last_hash),
        )
        return self.append(tail)

    def check_tokens(self, token_ids: TokenIds) -> None:
        """Check that the rows were computed for these tokens.

        Args:
            token_ids: all tokens from position 0 on, at least up to `stop`; more are not looked at.

        Raises:
            TokenMismatchError: with the first position that differs, and the shift if there is one.
        """
        check_row_tokens(self.token_hash_T, self.prefix_hash, self.start, as_token_ids(token_ids))

    def check_distinct(self) -> None:
        """Check that no valid row names an expert twice in one layer, as no top-k ever does.

        Raises:
            RecordError: with position, layer and ids of the first one.
        """
        sorted_TLK = np.sort(self.ids_TLK, axis=2)
        twice_TL = (sorted_TLK[:, :, 1:] == sorted_TLK[:, :, :-1]).any(axis=2)
        twice_TL &= self.valid_T[:, None]
        if twice_TL.any():
            row, layer = _first(twice_TL)
            raise RecordError(
                f"{self._place(row, layer)} names an expert twice: {self.ids_TLK[row, layer]}; "
                "these are not the choices of a router"
            )

    def to_array(self, absent: Literal["error"] | int = "error") -> npt.NDArray[np.integer]:
        """The ids as an array `[T, L, K]`.

        Args:
            absent: `"error"` refuses a record with absent rows. A number fills them: one that no
                expert has, such as -1.

        Returns:
            A read-only view in the schema's dtype, or, when a number is given, an array of the
            smallest dtype that holds that number and every id of the schema.

        Raises:
            RecordError: there are absent rows, or the filler is an expert's id.
        """
        if absent == "error":
            return self.complete_ids("pass absent=-1 to mark them")
        if 0 <= absent < self.schema.num_experts:
            raise RecordError(
                f"absent={absent} is an expert of this model, so an absent row would look like a "
                "choice; use -1"
            )
        dtype = np.result_type(self.schema.dtype, np.min_scalar_type(absent))
        ids_TLK = self.ids_TLK.astype(dtype)
        ids_TLK[~self.valid_T] = absent
        return ids_TLK

    def complete_ids(self, remedy: str) -> RouteIds:
        """The ids of a record without absent rows, a read-only view `[T, L, K]`.

        Args:
            remedy: what a caller can do about absent rows; it ends the message.

        Raises:
            RecordError: there are absent rows.
        """
        if self.complete:
            return self.ids_TLK
        first = self.start + int(np.flatnonzero(~self.valid_T)[0])
        num_absent = self.num_rows - int(self.valid_T.sum())
        raise RecordError(
            f"{num_absent} of {self.num_rows} rows are absent, the first at position {first}; "
            f"{remedy}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return (
            self.schema == other.schema
            and (self.start, self.prefix_hash) == (other.start, other.prefix_hash)
            and self.provenance == other.provenance
            and np.array_equal(self.valid_T, other.valid_T)
            and np.array_equal(self.token_hash_T, other.token_hash_T)
            and np.array_equal(self.ids_TLK, other.ids_TLK)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RoutedExperts(positions [{self.start}, {self.stop}), "
            f"{int(self.valid_T.sum())} valid, {self.schema.num_layers} layers, "
            f"top {self.schema.top_k} of {self.schema.num_experts})"
        )

    def __reduce__(self) -> tuple[Callable[..., RoutedExperts], tuple[dict[str, Any]]]:
        # Pickling an array loses its read-only flag, so the other side makes the record anew.
        return _remake, (vars(self),)

    def _settle(self, name: str, value: object) -> None:
        """Set a field during construction, before anyone else has seen the record."""
        object.__setattr__(self, name, value)

    def _place(self, row: int, layer: int) -> str:
        return (
            f"row {row} (position {self.start + row}), layer {self.schema.layer_ids[layer]} "
            f"(entry {layer} of the layer axis)"
        )

    def _check_axes(self) -> None:
        schema, ids_TLK = self.schema, self.ids_TLK
        if ids_TLK.dtype != schema.dtype or ids_TLK.shape[1:] != schema.shape(0)[1:]:
            raise SchemaMismatchError(
                f"ids are {ids_TLK.dtype} of shape {list(ids_TLK.shape)}; the schema asks for "
                f"{schema.dtype} of shape [rows, {schema.num_layers}, {schema.top_k}]"
            )
        if not 0 <= self.start <= self.stop <= _MAX_POSITION:
            raise SpanError(f"start={self.start} is negative or beyond position {_MAX_POSITION}")
        for name, array, dtype in (
            ("valid_T", self.valid_T, np.bool_),
            ("token_hash_T", self.token_hash_T, np.uint32),
        ):
            if array.dtype != dtype or array.shape != (len(ids_TLK),):
                raise SpanError(
                    f"{name} is {array.dtype} of shape {list(array.shape)}; it must be "
                    f"{np.dtype(dtype)} of shape [{len(ids_TLK)}], one value a row"
                )

    def _check_ids(self) -> None:
        num_experts = self.schema.num_experts
        if not self.ids_TLK.size or num_experts > self.schema.absent:
            return
        # The maximum is several times cheaper than a mask and settles nearly every record.
        if self.ids_TLK.max() < num_experts:
            return
        bad_TL = (self.ids_TLK >= num_experts).any(axis=2) & self.valid_T[:, None]
        if bad_TL.any():
            row, layer = _first(bad_TL)
            raise SchemaMismatchError(
                f"{self._place(row, layer)} names expert {int(self.ids_TLK[row, layer].max())}, "
                f"but the schema has only {num_experts} experts"
            )

    def _check_provenance(self) -> None:
        spans = self.provenance
        if spans and not self.start <= spans[0].start < spans[-1].stop <= self.stop:
            raise SpanError(
                f"provenance {spans[0]} .. {spans[-1]} leaves the record's positions "
                f"[{self.start}, {self.stop})"
            )
        # The usual case needs no array of origins: each row of a stream is a record.
        covers_all = len(spans) == 1 and spans[0].stop - spans[0].start == self.num_rows
        if covers_all and self.valid_T.all():
            return
        origin_T, _ = rows_of_provenance(spans, self.start, self.num_rows)
        wrong_T = (origin_T != ABSENT) != self.valid_T
        if wrong_T.any():
            row = int(np.flatnonzero(wrong_T)[0])
            said = "valid, but no provenance" if self.valid_T[row] else "absent, but a provenance"
            raise SpanError(f"the row at position {self.start + row} is {said} covers it")

    def _check_prefix(self) -> None:
        if not 0 <= self.prefix_hash < _HASHES or (self.start == 0 and self.prefix_hash):
            raise TokenMismatchError(
                f"prefix_hash={self.prefix_hash} at start {self.start}: it is the 32-bit hash of "
                "the tokens before the start, and 0 if there are none"
            )


def _as_versions(version_T: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Weight versions as uint32; a cast alone would wrap what does not fit."""
    given = np.asarray(version_T)
    if given.dtype.kind not in "iu" or (
        given.size and not 0 <= given.min() <= given.max() < _HASHES
    ):
        raise RecordError(f"weight versions {given} are not whole numbers below 2**32")
    return given.astype(np.uint32)


def _remake(fields: dict[str, Any]) -> RoutedExperts:
    return RoutedExperts(**fields)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


def _absent_filled(record: RoutedExperts) -> RouteIds:
    """The record's ids with `schema.absent` in every absent row; a copy only if that is new."""
    absent_T = ~record.valid_T
    if not absent_T.any() or (record.ids_TLK[absent_T] == record.schema.absent).all():
        return record.ids_TLK
    ids_TLK = record.ids_TLK.copy()
    ids_TLK[absent_T] = record.schema.absent
    return ids_TLK


def _first(mask_TL: Mask) -> tuple[int, int]:
    row, layer = np.argwhere(mask_TL)[0]
    return int(row), int(layer)


def _check_follows(a: RoutedExperts, b: RoutedExperts, index: int) -> None:
    if a.schema != b.schema:
        raise SchemaMismatchError(f"record {index} has {b.schema}, the one before {a.schema}")
    if b.start != a.stop:
        raise SpanError(
            f"record {index} begins at position {b.start}, but the one before ends at {a.stop}; "
            "slice it so that it begins there"
        )
    if b.prefix_hash != a.last_hash:
        raise TokenMismatchError(
            f"record {index} follows other tokens before position {b.start} than those of the "
            "records before it"
        )
