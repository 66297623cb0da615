"""Token ids of the batch, where the model runs.

A sampled token is the input of a later step. It is written here by the device that sampled it, so that no step waits
until the host has seen the tokens of the step before.

Legend of shape suffixes: T = tokens of a step, B = sampled requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from routebook.engine.transfers import upload


class TokenTable:
    """Token ids `[rows, max_model_len + 1]`; the last column takes what is sampled at the model's limit.

    Args:
        num_rows: requests at most.
        max_model_len: tokens of a request at most.
        device: where the model runs.
    """

    def __init__(self, num_rows: int, max_model_len: int, device: torch.device) -> None:
        self.row_length = max_model_len + 1
        with torch.inference_mode(False):
            self._flat = torch.zeros(num_rows * self.row_length, dtype=torch.int32, device=device)

    def put(self, row: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Begin a row with these tokens."""
        (tokens,) = upload(self._flat.device, token_ids.astype(np.int32))
        first = row * self.row_length
        self._flat[first : first + len(tokens)] = tokens

    def take(self, places_T: torch.Tensor) -> torch.Tensor:
        """Tokens at these places, int64 `[T]`; place = row * row_length + position."""
        return self._flat.index_select(0, places_T).long()

    def write(self, places_B: torch.Tensor, token_ids_B: torch.Tensor) -> None:
        """Put sampled tokens at these places."""
        self._flat.index_copy_(0, places_B, token_ids_B.to(torch.int32))
