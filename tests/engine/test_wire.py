"""Arrays in messages: nothing is changed, and nothing is copied."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from routebook.capture.outputs import RoutedExpertsLists
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import (
    ForcedRows,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SideOutputs,
    TokenLogprobs,
)
from routebook.engine.wire import Codec, FromWorker, StageWeights, ToWorker
from routebook.engine.wire_delta import OtherOrder, RunStep


def output_of(ids_TLK: np.ndarray) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        request_ids=["3.0", "1.1"],
        starts_R=np.array([4, 9, 0, 9])[::2],
        counts_R=np.array([1, len(ids_TLK) - 1]),
        sampled_token_ids={"3.0": 7},
        logprobs={"3.0": TokenLogprobs(token_id=7, logprob=-0.25, top=((7, -0.25), (9, -3.5)))},
        side=SideOutputs(routed_experts=RoutedExpertsLists(ids_TLK)),
    )


def rows_of(message: FromWorker) -> np.ndarray:
    assert isinstance(message, OtherOrder)
    assert message.output.side.routed_experts is not None
    return message.output.side.routed_experts.ids_TLK


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("rows", [1, 5, 4000])
def test_rows_arrive_as_they_were_and_are_not_copied(rows: int, dtype: type[Any]) -> None:
    ids_TLK = np.random.default_rng(0).integers(0, 255, (rows, 6, 4)).astype(dtype)
    ids_TLK[-1] = np.iinfo(dtype).max
    codec: Codec[FromWorker] = Codec(FromWorker)
    frames = codec.encode(OtherOrder(output_of(ids_TLK)))
    sent = np.frombuffer(frames[-1], np.uint8)
    assert np.shares_memory(sent, ids_TLK)
    message = codec.decode(frames)
    arrived = rows_of(message)
    assert np.shares_memory(arrived, ids_TLK)
    assert arrived.dtype == dtype
    np.testing.assert_array_equal(arrived, ids_TLK)
    assert isinstance(message, OtherOrder)
    assert message.output.logprobs == output_of(ids_TLK).logprobs
    assert message.output.sampled_token_ids == {"3.0": 7}
    assert message.output.request_ids == ["3.0", "1.1"]
    assert message.output.starts_R.tolist() == [4, 0]


def test_a_view_with_gaps_and_an_empty_array_keep_their_form() -> None:
    codec: Codec[FromWorker] = Codec(FromWorker)
    ids_TLK = np.arange(10 * 3 * 8, dtype=np.uint8).reshape(10, 3, 8)[::2, :, ::-2]
    arrived = rows_of(codec.decode(codec.encode(OtherOrder(output_of(ids_TLK)))))
    np.testing.assert_array_equal(arrived, ids_TLK)
    empty = rows_of(codec.decode(codec.encode(OtherOrder(output_of(ids_TLK[:0])))))
    assert empty.shape == (0, 3, 4)


def test_a_step_arrives_as_it_was_planned() -> None:
    params = SamplingParams(n=3, stop=("a", "b"), stop_token_ids=(4,), seed=2**62, logprobs=1)
    forced = ForcedRows(
        start=1, ids_TLK=np.full((2, 3, 4), 300, np.uint16), valid_T=np.array([True, False])
    )
    new = NewRequestData(
        request_id="0.2",
        token_ids=np.arange(5, dtype=np.int32),
        block_ids=[9, 2],
        sampling_params=params,
        seed=2**63 - 1,
        forced=forced,
    )
    step = SchedulerOutput(
        num_scheduled_tokens={"0.2": 5, "0.1": 1},
        num_computed_tokens={"0.2": 0, "0.1": 77},
        runs={"0.2": 1, "0.1": 0},
        weight_version=3,
        new_requests=[new],
        new_block_ids={"0.1": [4]},
        dropped_request_ids=["0.0"],
        capture=True,
    )
    codec: Codec[ToWorker] = Codec(ToWorker)
    message = codec.decode(codec.encode(RunStep(b"", step)))
    assert isinstance(message, RunStep)
    (arrived,) = message.step.new_requests
    assert list(message.step.num_scheduled_tokens) == ["0.2", "0.1"]
    assert arrived.forced is not None
    np.testing.assert_array_equal(arrived.token_ids, new.token_ids)
    np.testing.assert_array_equal(arrived.forced.ids_TLK, forced.ids_TLK)
    assert arrived.forced.valid_T.dtype == np.bool_
    assert arrived.forced.valid_T.tolist() == [True, False]
    assert (arrived.sampling_params, arrived.seed, arrived.block_ids) == (params, new.seed, [9, 2])
    for name in ("num_computed_tokens", "runs", "weight_version", "new_block_ids", "capture"):
        assert getattr(message.step, name) == getattr(step, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_tensors_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    codec: Codec[ToWorker] = Codec(ToWorker)
    weights = {"whole": tensor}
    if tensor.ndim == 2:
        weights |= {"turned": tensor.mT, "with gaps": tensor[:, 1]}
    message = codec.decode(codec.encode(StageWeights(weights)))
    assert isinstance(message, StageWeights)
    assert isinstance(message.source, dict)
    assert message.source.keys() == weights.keys()
    for name, wanted in weights.items():
        assert message.source[name].dtype == dtype
        assert message.source[name].shape == wanted.shape
        assert torch.equal(message.source[name], wanted)


def test_what_has_no_form_is_refused() -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    with pytest.raises(NotImplementedError, match="complex has no form"):
        codec.encode(StageWeights({"a": 1j}))  # type: ignore[dict-item]
    with pytest.raises(msgspec.ValidationError):
        codec.decode([msgspec.msgpack.encode(["Unknown"])])
