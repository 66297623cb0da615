"""The rules of the capture buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from routebook.capture.buffer import CaptureBuffer
from routebook.errors import CaptureError
from routebook.routes.schema import RouteSchema


def make_buffer(num_experts: int = 16, max_tokens: int = 6) -> CaptureBuffer:
    schema = RouteSchema(layer_ids=(1, 4), num_experts=num_experts, top_k=2, num_hidden_layers=5)
    return CaptureBuffer(schema, max_tokens, torch.device("cpu"))


def ids(num_tokens: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + num_tokens * 2).view(num_tokens, 2) % 16


@pytest.mark.parametrize(
    ("num_experts", "dtype", "host_dtype"),
    [
        (256, torch.uint8, np.uint8),
        (257, torch.int16, np.uint16),
        (512, torch.int16, np.uint16),
        (65536, torch.int16, np.uint16),
    ],
)
def test_ids_up_to_the_last_expert_survive(
    num_experts: int, dtype: torch.dtype, host_dtype: type
) -> None:
    wanted = [i for i in (0, 127, 128, 255, 256, 511, 32767, 32768, 65535) if i < num_experts]
    wanted += [num_experts - 1] * (len(wanted) % 2)
    ids_NK = torch.tensor(wanted).view(-1, 2)
    buffer = make_buffer(num_experts)
    buffer.begin(len(ids_NK))
    buffer.capture(0, ids_NK)
    buffer.capture(1, ids_NK.flip(0).int())
    tensors = buffer.snapshot()
    lists = tensors.to_cpu_nonblocking().tolists()
    assert tensors.ids_TLK.dtype == dtype
    assert lists.ids_TLK.dtype == host_dtype
    assert lists.ids_TLK[:, 0].tolist() == ids_NK.tolist()
    assert lists.ids_TLK[:, 1].tolist() == ids_NK.flip(0).tolist()


def test_a_snapshot_outlives_later_forwards() -> None:
    buffer = make_buffer()
    snapshots = []
    for step in range(3):
        buffer.begin(4)
        buffer.capture(0, ids(4, step))
        buffer.capture(1, ids(4, step + 1))
        snapshots.append(buffer.snapshot().ids_TLK)
    for step, rows in enumerate(snapshots):
        assert rows[:, 0].tolist() == ids(4, step).tolist()
        assert rows[:, 1].tolist() == ids(4, step + 1).tolist()


@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (1, 2), (4, 1), (4, 3), (8,), (1, 4, 2)])
def test_other_shapes_are_refused_and_write_nothing(shape: tuple[int, ...]) -> None:
    buffer = make_buffer()
    buffer.begin(4)
    buffer.capture(1, ids(4))
    with pytest.raises(CaptureError, match=r"layer 1 .*of 4 tokens with top-k 2"):
        buffer.capture(0, torch.ones(shape, dtype=torch.long))
    buffer.capture(0, ids(4, 7))
    assert buffer.snapshot().ids_TLK[:, 0].tolist() == ids(4, 7).tolist()


def test_a_refused_write_leaves_the_layer_missing() -> None:
    buffer = make_buffer()
    buffer.begin(4)
    buffer.capture(1, ids(4))
    with pytest.raises(CaptureError):
        buffer.capture(0, ids(5))
    with pytest.raises(CaptureError, match=r"layers \[1\] did not capture"):
        buffer.snapshot()


def test_a_second_capture_of_a_layer_is_refused_and_writes_nothing() -> None:
    buffer = make_buffer()
    buffer.begin(4)
    buffer.capture(0, ids(4))
    with pytest.raises(CaptureError, match="layer 1 captured twice"):
        buffer.capture(0, ids(4, 5))
    buffer.capture(1, ids(4))
    assert buffer.snapshot().ids_TLK[:, 0].tolist() == ids(4).tolist()


def test_a_layer_of_the_forward_before_does_not_count() -> None:
    buffer = make_buffer()
    buffer.begin(4)
    buffer.capture(0, ids(4))
    buffer.begin(4)
    buffer.capture(1, ids(4))
    with pytest.raises(CaptureError, match=r"layers \[1\] did not capture"):
        buffer.snapshot()


def test_more_rows_than_the_buffer_holds() -> None:
    buffer = make_buffer(max_tokens=6)
    buffer.begin(6)
    with pytest.raises(CaptureError, match="7 tokens does not fit the capture buffer of 6"):
        buffer.begin(7)


def test_capture_and_snapshot_need_a_forward() -> None:
    buffer = make_buffer()
    with pytest.raises(CaptureError, match="no begin"):
        buffer.capture(0, ids(4))
    with pytest.raises(CaptureError, match="begin"):
        buffer.snapshot()
    buffer.begin(4)
    buffer.capture(0, ids(4))
    buffer.capture(1, ids(4))
    buffer.snapshot()
    with pytest.raises(CaptureError, match="begin"):
        buffer.snapshot()


class ForgetfulBuffer(CaptureBuffer):
    """Believes to have captured, but writes no id: what a stale compiled forward looks like."""

    def capture(self, layer_index: int, topk_ids: torch.Tensor) -> None:
        self._captured[layer_index] = True


def test_poison_in_the_first_forward_is_found() -> None:
    schema = make_buffer().schema
    buffer = ForgetfulBuffer(schema, 6, torch.device("cpu"))
    for _ in range(2):
        buffer.begin(3)
        buffer.capture(0, ids(3))
        buffer.capture(1, ids(3))
        with pytest.raises(CaptureError, match=r"layers \[1, 4\] left rows without"):
            buffer.snapshot()


def test_an_empty_forward_proves_nothing() -> None:
    schema = make_buffer().schema
    buffer = ForgetfulBuffer(schema, 6, torch.device("cpu"))
    for num_tokens in (0, 3):
        buffer.begin(num_tokens)
        buffer.capture(0, ids(num_tokens))
        buffer.capture(1, ids(num_tokens))
        if num_tokens == 0:
            assert buffer.snapshot().ids_TLK.shape == (0, 2, 2)
    with pytest.raises(CaptureError, match="without an expert's id"):
        buffer.snapshot()


def test_an_id_beyond_the_experts_is_found_in_the_first_forward() -> None:
    buffer = make_buffer(num_experts=16)
    buffer.begin(3)
    buffer.capture(0, ids(3))
    buffer.capture(1, torch.full((3, 2), 16))
    with pytest.raises(CaptureError, match=r"layers \[4\] left rows"):
        buffer.snapshot()


def test_made_in_inference_mode_it_works_outside() -> None:
    with torch.inference_mode():
        buffer = make_buffer()
    for inference in (False, True):
        with torch.inference_mode(inference):
            buffer.begin(2)
            buffer.capture(0, ids(2))
            buffer.capture(1, ids(2))
            assert buffer.snapshot().ids_TLK.shape == (2, 2, 2)


def test_size_is_that_of_the_worst_step() -> None:
    assert make_buffer(max_tokens=6).nbytes == 6 * 2 * 2 * 4
