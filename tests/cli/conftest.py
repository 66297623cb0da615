"""One small record of the bundled model for all tests of the commands, and a way to run one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import huggingface_hub.constants
import pytest

from routebook.cli.main import main
from routebook.routes import RouteSample, read_routes

# More than one KV block each, so that the second prompt takes rows from the first one's block.
PROMPTS = ("12+34=46\n50+27=77\n8+5=13\n17+25=", "12+34=46\n50+27=77\n8+5=13\n40+41=")


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a mistake gets; progress bars were not started."""
        (line,) = self.err.splitlines()
        assert line.startswith("routebook: error: ")
        return line.removeprefix("routebook: error: ")


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """A name that is no folder is sought on the hub; here that ends at once."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def run(capsys) -> Run:
    def run_command(*arguments: str | Path) -> Done:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run_command


@pytest.fixture(scope="session")
def record(tmp_path_factory) -> Path:
    """Two greedy completions in float32; the second shares a block with the first."""
    path = tmp_path_factory.mktemp("record") / "tiny.routes"
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    options = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "5"]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main(["generate", "tiny", *prompts, *options, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def samples(record) -> list[RouteSample]:
    return list(read_routes(record))


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory) -> Path:
    """A folder with a dense model and no tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> Path:
    """A folder with a mixture of experts that made no record, and no tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path_factory.mktemp("other")
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path
