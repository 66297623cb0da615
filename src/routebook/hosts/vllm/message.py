"""What rides from the worker to the scheduler as an attribute of vLLM's `ModelRunnerOutput`.

Legend of shape suffixes: T = rows of the step in the order of the batch that ran, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routebook.routes.schema import RouteSchema

_ATTRIBUTE = "routebook_rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMessage:
    """All rows of one step, for the requests in the order of `ModelRunnerOutput.req_ids`."""

    schema: RouteSchema
    """The model's, as its modules tell it: the scheduler has no other source."""

    ids_TLK: npt.NDArray[np.unsignedinteger]
    """Logical expert ids in the schema's dtype; nobody else holds the array."""


def attach(output: Any, message: StepMessage) -> None:
    """Let a `ModelRunnerOutput` carry the rows of its step. It is pickled with its attributes."""
    setattr(output, _ATTRIBUTE, message)


def attached(output: Any) -> StepMessage | None:
    """The rows that a `ModelRunnerOutput` carries."""
    message: StepMessage | None = getattr(output, _ATTRIBUTE, None)
    return message
