"""What megatron-core and verl make of a case of `layout_cases.py`, by their own functions.

Nothing here knows a rule: cases go in as these programs take them, and rows are read off by the tokens that come out.
Both need torch. verl's function is loaded from its file, since verl as a whole needs half a cluster to import.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.routes.layout_cases import TAG, Case

_VERL_FILE = "models/mcore/util.py"


# No megatron-core so far has the field that verl wants to note a contiguous cut in. The rows are cut by then, and verl
# takes a stand-in that accepts any field for one that has it.
_ANY_PACKED_SEQ_PARAMS = {
    "PackedSeqParams": SimpleNamespace,
    "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE": True,
}


class PeerCrashError(Exception):
    """The other program fails on a case for a reason that is not a rule of it."""


@cache
def megatron() -> SimpleNamespace:
    """The functions of megatron-core; ImportError without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(
            layer=importlib.import_module("megatron.core.transformer.transformer_layer"),
            block=importlib.import_module("megatron.core.transformer.transformer_block"),
            layout=importlib.import_module(
                "megatron.core.transformer.pipeline_parallel_layer_layout"
            ),
            utils=importlib.import_module("megatron.core.utils"),
            state=importlib.import_module("megatron.core.parallel_state"),
        )


@cache
def verl() -> ModuleType:
    """verl's packing module; ImportError without verl or megatron-core."""
    megatron()
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ImportError("verl is not installed")
    names = {
        "verl": ModuleType("verl"),
        "verl.utils": ModuleType("verl.utils"),
        "verl.utils.device": SimpleNamespace(is_npu_available=False),
        "verl.utils.model": SimpleNamespace(CausalLMOutputForPPO=object),
    }
    file = Path(spec.origin).parent / _VERL_FILE
    file_spec = importlib.util.spec_from_file_location("verl_mcore_util", file)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    with mock.patch.dict(sys.modules, names), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore")
        file_spec.loader.exec_module(module)
    module.logger.warning_once = lambda *_: None
    return module


def megatron_stages(case: Case) -> list[list[int]] | None:
    config = SimpleNamespace(
        num_layers=case["num_layers"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
        num_layers_in_first_pipeline_stage=case.get("first"),
        num_layers_in_last_pipeline_stage=case.get("last"),
        account_for_embedding_in_pipeline_split=case.get("embedding", False),
        account_for_loss_in_pipeline_split=case.get("loss", False),
        pipeline_model_parallel_layout=None,
    )
    stages = [(vp, pp) for vp in range(case["vpp"]) for pp in range(case["pp"])]
    answer = _megatron_custom if "per_stage" in case else _megatron_stage
    try:
        ranges = [answer(config, case, vp, pp) for vp, pp in stages]
    except AssertionError:
        return None
    except ZeroDivisionError as error:
        raise PeerCrashError from error
    layers = [layer for start, count in ranges for layer in range(start, start + count)]
    return ranges if layers == list(range(case["num_layers"])) else None


def _megatron_stage(config: SimpleNamespace, case: Case, vp: int, pp: int) -> list[int]:
    vp_stage = vp if case["vpp"] > 1 else None
    count = megatron().block.get_num_layers_to_build(config, vp_stage, pp)
    return [megatron().layer.get_transformer_layer_offset(config, vp_stage, pp), count]


def _megatron_custom(config: SimpleNamespace, case: Case, vp: int, pp: int) -> list[int]:
    stages = [["decoder"] * count for count in case["per_stage"]]
    layout = megatron().layout.PipelineParallelLayerLayout(stages, case["pp"])
    vpp = config.virtual_pipeline_model_parallel_size
    with patched("get_virtual_pipeline_model_parallel_world_size", vpp):
        layers = layout.get_layer_id_list(vp_stage=vp, pp_rank=pp)
        return [layout.get_layer_offset(vp_stage=vp, pp_rank=pp), len(layers)]


def patched(name: str, value: Any) -> Any:
    """A function of megatron-core's parallel state, with a given answer."""
    return mock.patch.object(megatron().state, name, return_value=value)


def megatron_padded(case: Case) -> list[list[int]]:
    import torch

    rows_b = TAG * torch.arange(case["batch"])[:, None]
    tokens_BS = rows_b + torch.arange(case["columns"])[None]
    answers = []
    for cp_rank in range(case["cp"]):
        local_BS = _on_cp_rank(tokens_BS, case["cp"], cp_rank)
        # As megatron-core's embedding does it: to [sequence, batch], then equal pieces of axis 0.
        pieces = local_BS.transpose(0, 1).chunk(case["tp"], dim=0)
        answers += [piece.reshape(-1).tolist() for piece in pieces]
    return answers


def _on_cp_rank(tokens_BS: Any, cp: int, cp_rank: int) -> Any:
    import torch

    function = megatron().utils.get_batch_on_this_cp_rank
    # 0.16 asks the parallel state; since 0.19 there must be a group, whose size torch is asked for.
    with_group = "is_hybrid_cp" in inspect.signature(function).parameters
    options = {"is_hybrid_cp": False, "cp_group": object()} if with_group else {}
    with (
        mock.patch.object(torch.distributed, "get_world_size", return_value=cp),
        mock.patch.object(torch.distributed, "get_rank", return_value=cp_rank),
        patched("get_context_parallel_world_size", cp),
        patched("get_context_parallel_rank", cp_rank),
    ):
        return function({"tokens": tokens_BS}, **options)["tokens"]


def verl_packed(case: Case) -> list[list[int]]:
    import torch

    # verl pads with 0, so tags begin at 1.
    sequences = [1 + TAG * i + torch.arange(n) for i, n in enumerate(case["lengths"])]
    input_ids = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    answers = []
    for cp_rank in range(case["cp"]):
        mpu = SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: case["tp"],
            get_context_parallel_world_size=lambda: case["cp"],
            get_context_parallel_rank=lambda rank=cp_rank: rank,
        )
        with mock.patch.multiple(verl(), mpu=mpu, **_ANY_PACKED_SEQ_PARAMS):
            tokens, _, _ = verl().preprocess_thd_engine(
                input_ids,
                use_fp8_padding=case["fp8"],
                min_local_rows=case["min_local_rows"],
                pad_to_length_bucket=case["bucket"],
                cp_layout="contiguous" if case["contiguous"] else "zigzag",
            )
        answers.append((tokens[0] - 1).tolist())
    return answers
