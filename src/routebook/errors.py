"""Every error that Routebook raises on purpose.

    RoutebookError
    ├── ConfigError (ValueError)            an option whose value cannot work
    ├── RequestError (ValueError)           a request that cannot be served as asked
    ├── ModelError (ValueError)             a model that cannot be used
    │   ├── ModelNotFoundError (FileNotFoundError)
    │   ├── DenseModelError                 no mixture-of-experts layer at all
    │   ├── UncapturableError               a router whose choice cannot be captured
    │   └── ModelMismatchError              a record that another model made
    ├── RecordError (ValueError)            records that do not fit together
    │   ├── SchemaMismatchError             other layers, experts or top-k
    │   ├── SpanError                       positions that do not follow or lie outside
    │   └── TokenMismatchError              rows and tokens do not belong together
    ├── FormatError (ValueError)            bytes that are not what they should be
    │   ├── TruncatedError                  the data ends too early
    │   └── DamagedError                    the data contradicts itself or its checksum
    ├── CaptureError (RuntimeError)         a forward broke a rule of capture; nothing was written
    ├── ReplayError (RuntimeError)          a forward could not be replayed or recorded as asked
    ├── LedgerError (RuntimeError)          the ledger was used against its contract
    │   └── IntegrityError                  a recount found a leak or a contradiction
    ├── WorkerError (RuntimeError)           the worker failed, so the engine stands still
    │   └── WorkerDiedError                 its process has ended
    ├── ServerError (RuntimeError)          a server did not do what a client asked of it
    │   └── UnreachableError                it could not be reached, or went away before its answer was there
    └── MissingExtraError (ImportError)     an optional dependency is not installed

A caller's mistake gets one of these, with the value and the remedy in the message. Our own bugs get an
``assert``. Imports inside functions are used for one purpose only: optional extras, at the place that needs them.
"""

from __future__ import annotations


class RoutebookError(Exception):
    """Base of all errors that Routebook raises on purpose."""


class ConfigError(RoutebookError, ValueError):
    """An option has a value that cannot work."""


class RequestError(RoutebookError, ValueError):
    """A request cannot be served as asked; other requests are not touched."""


class ModelError(RoutebookError, ValueError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """No model lies at the given place."""


class DenseModelError(ModelError):
    """The model has no mixture-of-experts layer, so there is nothing to capture."""


class UncapturableError(ModelError):
    """A router's choice cannot be captured; the message names the module and the reason."""


class ModelMismatchError(ModelError):
    """A record was made by another model than the one given."""


class RecordError(RoutebookError, ValueError):
    """Records, rows or tokens do not fit together."""


class SchemaMismatchError(RecordError):
    """Two things describe other layers, another number of experts or another top-k."""


class SpanError(RecordError):
    """A span of positions does not follow, overlaps, or lies outside the record."""


class TokenMismatchError(RecordError):
    """The rows were computed for other tokens than the ones given."""


class FormatError(RoutebookError, ValueError):
    """Bytes or text are not in the format that they should be in."""


class TruncatedError(FormatError):
    """The data ends before its own header says it does."""


class DamagedError(FormatError):
    """The data contradicts itself or its checksum."""


class CaptureError(RoutebookError, RuntimeError):
    """A forward pass broke a rule of capture; no row of that pass was handed out."""


class ReplayError(RoutebookError, RuntimeError):
    """A forward could not be replayed or recorded as asked; its output must not be used."""


class LedgerError(RoutebookError, RuntimeError):
    """The ledger was used against its contract."""


class IntegrityError(LedgerError):
    """A recount found a leak or a contradiction."""


class WorkerError(RoutebookError, RuntimeError):
    """The worker failed, so the engine has ended all open requests and stands still until it is restarted.

    What the requests have so far is handed out by the engine's next `step`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.request_ids: tuple[str, ...] = ()
        """Prompts that were open."""


class WorkerDiedError(WorkerError):
    """The worker's process has ended."""


class ServerError(RoutebookError, RuntimeError):
    """A server did not do what a client asked of it; the message has the server's reason.

    Args:
        message: what happened.
        status: HTTP status of the answer, None if it had come to no answer or the answer broke off.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ServerError):
    """A server could not be reached, or went away before its answer was there."""


class MissingExtraError(RoutebookError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""
