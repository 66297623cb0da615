"""What a run of the state machine did, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class Totals:
    """Counters; those of several runs can be added."""

    examples: int = 0
    steps: int = 0
    completions: int = 0
    rows: int = 0
    """Rows that were compared, each with the one that it had to be."""
    rows_found: int = 0
    """Of these: computed by another request, and found in the prefix cache."""
    rows_recomputed: int = 0
    """Of these: of a recomputation after a preemption, where the latest row was asked for."""
    rows_earlier: int = 0
    """Of these: kept from the record of an aborted run."""
    rows_plain: int = 0
    """Of these: compared with a plain forward of transformers as well."""
    rows_absent: int = 0
    """Rows that had to be absent, and were: the request was aborted before they were there."""
    preemptions: int = 0
    stopped: int = 0
    aborted: int = 0
    continued: int = 0
    forced: int = 0
    updates: int = 0
    resets: int = 0
    pauses: int = 0

    def add(self, other: Totals) -> None:
        """Count what another run did."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def missing(self) -> list[str]:
        """Counters that are still zero: what was never tried."""
        return [name for name, count in asdict(self).items() if not count]

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in asdict(self).items())
