"""Shared set-up of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.engine.machine_report"]

# A gate must give the same answer twice; the search for new cases goes on wherever CI is not set.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Several threads are many times slower on a small busy machine, and change the order of sums."""
    import torch

    torch.set_num_threads(1)
