"""Shared set-up of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.engine.machine_report"]

# How long an example takes says something of the machine and nothing of the code.
settings.register_profile("local", deadline=None)
# A gate must give the same answer twice; the search for new cases goes on wherever CI is not set.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Several threads are many times slower on a small busy machine, and change the order of sums."""
    import torch

    torch.set_num_threads(1)
