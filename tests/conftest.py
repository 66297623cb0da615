"""Shared set-up of all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Several threads are many times slower on a small busy machine, and change the order of sums."""
    import torch

    torch.set_num_threads(1)
