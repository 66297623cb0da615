"""Rollouts by a server that gets the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvloop")

from routebook import Client
from routebook.errors import ConfigError, ServerError
from tests.replay.trl.runs import (
    ReplayConfig,
    ServerRollouts,
    logged,
    make,
)
from tests.server.conftest import RunningServer, running


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(engine={"dtype": "float32", "reference": False}) as server:
        yield server


def test_a_server_gets_the_weights_and_gives_the_rows(server, tmp_path):
    with Client(server.url) as client:
        before = client.generate([1, 2], None).choices[0].routed_experts
        version = before.provenance[0].weight_version
        rollouts = ServerRollouts(client, weights_dir=tmp_path / "weights")
        trainer = make(
            tmp_path, rollouts, ReplayConfig(native_every=1), max_steps=3, learning_rate=1e-2
        )
        trainer.train()
    assert logged(trainer, "replay/weight_version") == [version + 1.0, version + 2.0, version + 3.0]
    assert logged(trainer, "replay/sequences") == [1.0] * 3
    # Same number format and, at every step, same weights: with other ones the gap would be that of a step.
    assert max(logged(trainer, "replay/gap/max")) < 1e-3
    server.settle()


def test_another_way_to_bring_weights(server, tmp_path):
    asked: list[int] = []

    def update_weights(trainer: Any) -> None:
        asked.append(trainer.state.global_step)

    with Client(server.url, routed_experts_format="sglang") as client:
        rollouts = ServerRollouts(client, update_weights=update_weights, max_requests=2)
        trainer = make(tmp_path, rollouts, max_steps=2)
        trainer.train()
    assert asked == [0, 1]
    assert logged(trainer, "replay/sequences") == [1.0] * 2
    assert not logged(trainer, "replay/weight_version")


def test_a_server_that_does_not_take_the_weights_is_an_error(server, tmp_path):
    with Client(server.url) as client:
        trainer = make(tmp_path, ServerRollouts(client, weights_dir=tmp_path / "weights"))
        trainer.model.save_pretrained = lambda folder: None  # as if the server saw another disk
        with pytest.raises(ServerError, match="did not take the new weights"):
            trainer.train()


def test_a_server_that_is_not_there_is_an_error(tmp_path):
    with Client("http://127.0.0.1:9") as client:
        trainer = make(tmp_path, ServerRollouts(client, weights_dir=tmp_path / "weights"))
        with pytest.raises(ServerError, match="did not take the new weights"):
            trainer.train()


@pytest.mark.parametrize(
    "ways",
    [{}, {"weights_dir": "x", "update_weights": print}, {"weights_dir": "x", "max_requests": 0}],
)
def test_one_way_to_bring_weights_is_needed(ways):
    with Client("http://127.0.0.1:9") as client, pytest.raises(ConfigError):
        ServerRollouts(client, **ways)
