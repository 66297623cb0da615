"""megatron-core on the CPU for the tests of this folder, which are left out where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.replay.megatron import cpu, models


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """One process, with process groups of one."""
    pytest.importorskip("megatron.core.models.gpt.gpt_model")
    with pytest.MonkeyPatch.context() as monkey:
        cpu.patch(monkey)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.set_num_threads(1)
        models.start()
        yield
        dist.destroy_process_group()
