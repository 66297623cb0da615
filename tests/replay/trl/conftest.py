"""What all runs of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import huggingface_hub.constants
import pytest


@pytest.fixture(scope="session", autouse=True)
def no_hub() -> Iterator[None]:
    """TRL reports to the hub that a trainer was made; tests do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield
