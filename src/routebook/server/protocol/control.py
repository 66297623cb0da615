"""Bodies of the endpoints that steer the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from routebook.server.protocol.base import Body

Mode = Literal["wait", "abort", "keep"]


class PauseRequest(Body):
    """What becomes of open requests: run to their end first, ended with what they have, or left where they are."""

    mode: Mode = "keep"


class UpdateWeightsRequest(Body):
    """New weights, in a folder that the server can read or on the hub."""

    model_path: str = Field(min_length=1, max_length=4096)
    mode: Mode = "wait"
