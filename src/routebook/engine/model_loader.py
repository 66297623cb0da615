"""A transformers model made ready: loaded unchanged, set to the paged attention function, and checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from routebook.engine.attention import ATTENTION_NAME, register_attention
from routebook.engine.config import ModelConfig
from routebook.engine.experts import EXPERTS_NAME, register_experts
from routebook.errors import (
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    UncapturableError,
)
from routebook.models import BUNDLED_MODELS, bundled_model_path
from routebook.routes import RouteSample

_FINGERPRINT_SAMPLES = 64
_SWITCHING_ROPE = ("dynamic", "longrope")
_UNLIMITED = 2**20
"""For models without positions, recurrent ones for instance."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model and what the engine has to know about it."""

    model: Any
    """The transformers model, in evaluation mode."""
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype


def load_model(model: str | Any, config: ModelConfig) -> LoadedModel:
    """Load a model by name, or take one that is in memory, and prepare it for the engine.

    Args:
        model: a folder, a hub id, the name of a bundled model, or a transformers model. A model that is in memory is
            changed: it is moved, cast and set to the paged attention function.
        config: number format and device.

    Raises:
        ModelNotFoundError: no model lies there.
        UncapturableError: the model shares keys and values between layers, or is no decoder.
        ConfigError: the device is not there.
    """
    register_attention()
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        # The reference mode is exact in what it compares; a checkpoint in bfloat16 is widened for it.
        dtype = "float32" if config.reference and config.dtype == "auto" else config.dtype
        model = load_pretrained(resolve_model(model), dtype)
    elif config.dtype != "auto":
        model = model.to(_DTYPES[config.dtype])
    _check_decoder(model)
    if model.dtype not in _DTYPES.values():
        raise ConfigError(
            f"the model is in {model.dtype}, which is not served; use dtype={' or '.join(map(repr, _DTYPES))}"
        )
    if config.reference and model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"reference=True needs float32 or float64, the model is in {model.dtype}")
    # The reference mode is one of the CPU, also where there is a GPU.
    model = model.to(pick_device("cpu" if config.reference else config.device)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    _set_experts(model, config)
    text_config = model.config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        name=name,
        fingerprint=model_fingerprint(model),
        vocab_size=int(text_config.vocab_size),
        max_model_len=_max_model_len(text_config),
        eos_token_ids=_eos_token_ids(model),
        device=model.device,
        dtype=model.dtype,
    )


def resolve_model(name: str) -> str:
    """Where a model lies: bundled, in a folder, or on the hub."""
    if name in BUNDLED_MODELS:
        return str(bundled_model_path(name))
    return name


def load_pretrained(path: str, dtype: str) -> Any:
    """Load a causal language model from a folder or the hub.

    Raises:
        ModelNotFoundError: neither has it; the message says where it was sought.
    """
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ModelNotFoundError(f"{path!r} holds no config.json; name the folder of a model")
    try:
        model_config = AutoConfig.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(
            path, config=model_config, dtype="auto" if dtype == "auto" else _DTYPES[dtype]
        )
    except OSError as error:
        raise ModelNotFoundError(
            f"no model {path!r}: it is no folder, none of {', '.join(BUNDLED_MODELS)}, and the hub"
            f" did not give it ({str(error).splitlines()[0]})"
        ) from error


def load_plain(name: str, config: ModelConfig) -> Any:
    """A model as transformers runs it, for forward passes in which nothing of the engine takes part.

    Raises:
        ModelError: the model cannot be used.
    """
    model = load_pretrained(resolve_model(name), config.dtype)
    model = model.to(pick_device(config.device)).eval()
    if model.dtype == torch.float64:
        # The grouped kernel, transformers' default, knows no float64.
        model.set_experts_implementation("eager")
    return model


def check_maker(sample: RouteSample, name: str, fingerprint: str) -> None:
    """Refuse a sample that says that another model made it.

    Raises:
        ModelMismatchError: with both models.
    """
    made_by = sample.meta.get("model_fingerprint")
    if made_by is not None and made_by != fingerprint:
        raise ModelMismatchError(
            f"the record was made by model {sample.meta.get('model', '?')!r} (fingerprint {made_by}),"
            f" not by {name!r} (fingerprint {fingerprint}); give the model that made it"
        )


def model_fingerprint(model: Any) -> str:
    """Sixteen hex digits that tell one set of weights from another, whatever dtype they are loaded in.

    Evenly spaced samples of every parameter and buffer, rounded to bfloat16: cheap, and different after any training
    step that moved the weights noticeably.
    """
    digest = hashlib.sha256()
    # Buffers too: the correction bias of some routers is one, and it decides the routing.
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
        sample = flat[::step].to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _set_experts(model: Any, config: ModelConfig) -> None:
    """Choose how the experts run, where a family leaves the choice."""
    if config.reference or model.dtype == torch.float64:
        # The grouped kernel knows no float64, and its sums depend on the batch.
        model.set_experts_implementation("eager")
    else:
        register_experts()
        model.set_experts_implementation(EXPERTS_NAME)


def load_tokenizer(model: str | Any) -> Any | None:
    """The model's tokenizer, or None when it has none: token ids then go in and come out.

    A model in memory has none, and neither has a folder without tokenizer files.
    """
    if not isinstance(model, str):
        return None
    path = resolve_model(model)
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(path)


def pick_device(name: str) -> torch.device:
    """The device of an option's value.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA device; use device='cpu'")
    return torch.device(name)


def _check_decoder(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UncapturableError(
            f"{type(model).__name__} is an encoder-decoder model, not a decoder"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UncapturableError(
            f"{type(model).__name__} shares keys and values between layers"
            f" (num_kv_shared_layers={config.num_kv_shared_layers}), which the paged pool does not serve"
        )


def _max_model_len(config: Any) -> int:
    """Longest sequence whose rotary frequencies do not depend on its length.

    Two kinds of rotary scaling switch their frequencies once the longest sequence of a batch passes a length: keys
    cached before would be wrong, and one sequence would change its neighbours.
    """
    limit = int(getattr(config, "max_position_embeddings", 0) or _UNLIMITED)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") in _SWITCHING_ROPE:
            limit = min(limit, int(kind.get("original_max_position_embeddings") or limit))
    return limit


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list | tuple) else [eos])
