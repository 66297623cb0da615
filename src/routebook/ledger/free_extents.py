"""Which chunks of a pool are free, as maximal extents, so that one owner's chunks can lie side by side."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from routebook.errors import IntegrityError

_STALE_PER_EXTENT = 4
_STALE_FLOOR = 64


class FreeExtents:
    """Disjoint free extents `[start, start + length)` that never touch each other.

    An owner that grows takes the extent right behind what it has. One that starts anew is put into the middle of
    the largest extent, because then both it and the owner before that extent have room to grow.
    """

    def __init__(self) -> None:
        self.total = 0
        """Free chunks in all extents."""
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        # (-length, end), largest first. The end stays when an extent is used from its front, so that needs no new
        # entry; one whose length is out of date is put right when it comes up.
        self._by_length: list[tuple[int, int]] = []

    def add(self, start: int, length: int) -> None:
        """Make `[start, start + length)` free and join it to its neighbours."""
        if start in self._start_before:
            before = self._start_before[start]
            length += self._cut(before)
            start = before
        if start + length in self._length_at:
            length += self._cut(start + length)
        self._put(start, length)

    def take(self, count: int, at: int | None) -> list[tuple[int, int]]:
        """Take `count` free chunks as few extents `(start, length)`, the first one at `at` if that is free."""
        assert count <= self.total, f"{count} chunks asked of {self.total} free ones"
        taken = []
        if count and at is not None and at in self._length_at:
            taken.append(self._take_front(at, count))
            count -= taken[-1][1]
        while count:
            start, length = self._largest()
            part = min(count, length)
            taken.append(self._take_part(start, (length - part) // 2, part))
            count -= part
        return taken

    def take_each(self, counts: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take chunks for several owners, each if possible behind what it has.

        Args:
            counts: how many chunks each owner wants, at least 1.
            after: for each owner the chunk behind which its own should lie, negative for no wish.

        Returns:
            Starts and lengths of the extents taken, owner by owner.
        """
        starts: list[int] = []
        lengths: list[int] = []
        for count, behind in zip(counts, after, strict=True):
            at = behind + 1
            if at and self._length_at.get(at, 0) > count:
                starts.append(at)
                lengths.append(count)
                self._shorten(at, count)
                continue
            for start, length in self.take(count, at if behind >= 0 else None):
                starts.append(start)
                lengths.append(length)
        return starts, lengths

    def check(self, capacity: int) -> list[int]:
        """List the free chunks, ascending.

        Raises:
            IntegrityError: extents overlap, touch, leave `[0, capacity)` or are counted wrongly.
        """
        chunks: list[int] = []
        end = -1
        for start, length in sorted(self._length_at.items()):
            if start <= end or length < 1 or start + length > capacity:
                raise IntegrityError(f"free extent {(start, length)} after {end} of {capacity}")
            if self._start_before.get(start + length) != start:
                raise IntegrityError(f"free extent {(start, length)} has no end")
            end = start + length
            chunks.extend(range(start, end))
        if len(chunks) != self.total or len(self._start_before) != len(self._length_at):
            raise IntegrityError(f"{len(chunks)} free chunks listed, {self.total} counted")
        return chunks

    def _take_front(self, start: int, count: int) -> tuple[int, int]:
        count = min(count, self._length_at[start])
        if count == self._length_at[start]:
            self._cut(start)
        else:
            self._shorten(start, count)
        return start, count

    def _shorten(self, start: int, count: int) -> None:
        """Take less than a whole extent from its front."""
        length = self._length_at.pop(start)
        self._length_at[start + count] = length - count
        self._start_before[start + length] = start + count
        self.total -= count

    def _take_part(self, start: int, skip: int, count: int) -> tuple[int, int]:
        length = self._cut(start)
        if skip:
            self._put(start, skip)
        if length > skip + count:
            self._put(start + skip + count, length - skip - count)
        return start + skip, count

    def _put(self, start: int, length: int) -> None:
        self.total += length
        self._length_at[start] = length
        self._start_before[start + length] = start
        heapq.heappush(self._by_length, (-length, start + length))
        if len(self._by_length) > _STALE_PER_EXTENT * len(self._length_at) + _STALE_FLOOR:
            self._by_length = [
                (-length, start + length) for start, length in self._length_at.items()
            ]
            heapq.heapify(self._by_length)

    def _cut(self, start: int) -> int:
        length = self._length_at.pop(start)
        self.total -= length
        del self._start_before[start + length]
        return length

    def _largest(self) -> tuple[int, int]:
        while True:
            listed, end = self._by_length[0]
            start = self._start_before.get(end)
            if start is not None and end - start == -listed:
                return start, end - start
            if start is not None and end - start < -listed:
                heapq.heapreplace(self._by_length, (start - end, end))
            else:
                # Gone, or longer than listed: then it has a better entry.
                heapq.heappop(self._by_length)
