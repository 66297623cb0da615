"""What both ledgers have in common: living requests, and steps that are taken over before they are written.

Legend of shape suffixes: R = requests of a step.
"""

from __future__ import annotations

from abc import abstractmethod

from routebook.config import check_at_least
from routebook.ledger.base import Ledger, StepRows
from routebook.ledger.late_chunks import LateChunks
from routebook.ledger.request_table import RequestTable
from routebook.ledger.spans import Index
from routebook.ledger.step_log import LoggedSteps, StepLog
from routebook.routes.schema import RouteSchema


class StepLedger(Ledger):
    """A ledger that writes decode steps together; see `step_log.py`.

    Whoever looks at rows, counts or ends a request calls :meth:`_write_out` first.

    Args:
        schema: layers, top-k and dtype of a row.
        block_size: tokens per KV block, at least 1.
        requests: the table of living requests, empty.
        recompute: one of `RECOMPUTE`.

    Raises:
        ConfigError: `block_size` is below 1.
    """

    def __init__(
        self, schema: RouteSchema, block_size: int, requests: RequestTable, recompute: str
    ) -> None:
        check_at_least("block_size", block_size, 1)
        self.schema = schema
        self.block_size = block_size
        self.recompute = recompute
        self._requests = requests
        self._published: dict[bytes, int] = {}
        self._late = LateChunks()
        self._log = StepLog(schema)

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Start a request; see :meth:`Ledger.begin`."""
        self._requests.begin(request_id, num_prompt_tokens)
        # The id names another request now; a row of the old one must not pass for the new one's block.
        self._late.forget_request(request_id)

    def store_batch(self, step: StepRows) -> None:
        """Take a step over, or write it at once; see :meth:`Ledger.store_batch`."""
        log = self._log
        if log.continues(step) and self._are_assigned(log.row_R, log.next_R):
            if log.append(step.ids_TLK):
                self._write_out()
            return
        self._close_batch()
        step.check(self.schema)
        row_R = self._requests.rows(step.request_ids)
        run_R = self._requests.runs(step, row_R)
        if self._is_loggable(step, row_R, run_R):
            log.open(step, row_R, run_R)
        else:
            self._store(step, row_R, run_R)

    def _is_loggable(self, step: StepRows, row_R: Index, run_R: Index) -> bool:
        """Whether a step is one row each of requests that live, in blocks of their current runs."""
        if not len(row_R) or len(step.ids_TLK) != len(row_R) or row_R.min() < 0:
            return False
        if (step.counts_R != 1).any() or (run_R != self._requests.run_N[row_R]).any():
            return False
        return self._are_assigned(row_R, step.starts_R) and not self._late.involves(
            step.request_ids
        )

    def _write_out(self) -> None:
        """Write the steps that were only taken over."""
        logged = self._log.take()
        if logged is not None and not self._store_decodes(logged):
            self._store(logged.merged(), logged.row_R, logged.run_R)

    def _close_batch(self) -> None:
        """As :meth:`_write_out`, before the requests of the batch, or what is known of them, may change."""
        self._write_out()
        self._log.close()

    @abstractmethod
    def _are_assigned(self, row_R: Index, positions_R: Index) -> bool:
        """Whether the ledger has a place for a row of each of these requests at these positions."""

    @abstractmethod
    def _store_decodes(self, logged: LoggedSteps) -> bool:
        """Store decodes that go to free places which only they can go to; False, with no row written, for others."""

    @abstractmethod
    def _store(self, step: StepRows, row_R: Index, run_R: Index) -> None:
        """Write any step that was checked, of requests in these table rows and runs."""
