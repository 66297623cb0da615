"""Stretches of consecutive positions: what a line of rows consists of, before and after it is cut.

A line is the order in which rows follow each other on a rank. Cutting it is arithmetic on a few stretches and never
touches a row.
"""

from __future__ import annotations

from typing import NamedTuple

NO_SEQUENCE = -1


class Segment(NamedTuple):
    """Rows at `num_rows` consecutive positions of one sequence, from `position` on.

    Positions before 0 and from the sequence's length on are padding; so is all of `NO_SEQUENCE`.
    """

    sequence: int
    position: int
    num_rows: int


Line = list[Segment]


def line_length(line: Line) -> int:
    """Rows of a line."""
    return sum(segment.num_rows for segment in line)


def cut(line: Line, start: int, stop: int) -> Line:
    """The rows `[start, stop)` of a line."""
    pieces: Line = []
    at = 0
    for sequence, position, num_rows in line:
        a, b = max(start, at), min(stop, at + num_rows)
        if a < b:
            pieces.append(Segment(sequence, position + a - at, b - a))
        at += num_rows
    return pieces


def equal_part(line: Line, parts: int, index: int) -> Line:
    """One of `parts` equal pieces of a line, whose length they divide."""
    size, rest = divmod(line_length(line), parts)
    assert not rest
    return cut(line, index * size, (index + 1) * size)


def zigzag_part(line: Line, parts: int, index: int) -> Line:
    """Of `2 * parts` equal chunks of a line the one at `index`, and then the one as far from the end."""
    front = equal_part(line, 2 * parts, index)
    return front + equal_part(line, 2 * parts, 2 * parts - 1 - index)
