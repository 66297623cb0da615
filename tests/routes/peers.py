"""How other programs write and read routed experts, told by numpy and Python's own base64 and json.

Each function is written from the layout that the other program documents, not from its code, and
shares nothing with `routebook.routes.formats`. Arrays are `[rows, num_hidden_layers, top_k]`.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from routebook.routes import RoutedExperts, RouteSchema


def all_layers(ids: np.ndarray, schema: RouteSchema) -> np.ndarray:
    """MoE layers in their places among the hidden layers, zeros elsewhere."""
    full = np.zeros((len(ids), schema.num_hidden_layers, ids.shape[2]), ids.dtype)
    for entry, layer in enumerate(schema.layer_ids):
        full[:, layer] = ids[:, entry]
    return full


def b64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def unb64(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(shape)


def smallest(array: np.ndarray) -> np.ndarray:
    greatest = int(array.max()) if array.size else 0
    for dtype in (np.uint8, np.int16, np.int32):
        if greatest <= np.iinfo(dtype).max:
            return array.astype(dtype)
    raise AssertionError


def signed(schema: RouteSchema) -> np.dtype:
    for dtype in (np.int8, np.int16, np.int32):
        if schema.num_experts - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise AssertionError


def write(name: str, record: RoutedExperts) -> Any:
    """The value that another program would send for this record; complete, but for `nemo_rl`."""
    schema, ids = record.schema, np.array(record.ids_TLK)
    full = all_layers(ids, schema)
    if name == "vllm":
        file = io.BytesIO()
        np.save(file, full)
        return base64.b64encode(file.getvalue()).decode()
    if name == "sglang":
        return b64(full.astype("<i4"))
    if name == "skyrl":
        small = smallest(full)
        return {"data": b64(small), "shape": list(small.shape), "dtype": small.dtype.name}
    if name == "prime_rl":
        described = {"shape": list(full.shape), "dtype": full.dtype.name, "start": record.start}
        return {"data": b64(full), **described}
    assert name == "nemo_rl"
    rows = np.full((record.stop + 1, *ids.shape[1:]), -1, signed(schema))
    rows[record.start : record.stop][record.valid_T] = ids[record.valid_T].astype(rows.dtype)
    return f"nrlre1:{rows.dtype.name}:{'x'.join(map(str, rows.shape))}:{b64(rows)}"


def read(name: str, value: Any, schema: RouteSchema, num_rows: int) -> np.ndarray:
    """What another program takes out of a value: `[rows, H, K]`, or `[tokens, L, K]` of `nemo_rl`."""
    if name == "vllm":
        return np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    if name == "sglang":
        return unb64(value, "<i4", (num_rows, schema.num_hidden_layers, schema.top_k))
    if name in ("skyrl", "prime_rl"):
        return unb64(value["data"], value["dtype"], tuple(value["shape"]))
    magic, dtype, shape, data = value.split(":", 3)
    assert magic == "nrlre1"
    return unb64(data, dtype, tuple(int(size) for size in shape.split("x")))
