"""The package in a bare environment: what `pip install` brings, and what works with only that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

REPOSITORY = Path(__file__).parent.parent
# The tests' own environment must not be visible from inside the bare one.
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}

WRITE_A_RECORD = """
import importlib.util, sys
import numpy as np
import routebook.ledger, routebook.routes
from routebook.routes import RoutedExperts, RouteSample, RouteSchema, RoutesWriter

for name in ("torch", "transformers"):
    assert importlib.util.find_spec(name) is None, name
assert routebook.__file__.startswith(sys.prefix), routebook.__file__
from routebook.routes.formats import get_format
schema = RouteSchema(layer_ids=(1, 2), num_hidden_layers=3, num_experts=8, top_k=2)
ids_TLK = np.array([[[0, 1], [2, 3]], [[0, 4], [2, 5]], [[0, 6], [7, 1]]], schema.dtype)
tokens = np.array([5, 6, 7, 8], np.int32)
record = RoutedExperts.from_rows(schema, ids_TLK, tokens)
vllm = get_format("vllm")
assert (vllm.decode(vllm.encode(record), schema, tokens).ids_TLK == ids_TLK).all()
with RoutesWriter("bare.routes") as writer:
    writer.write(RouteSample(record=record, token_ids=tokens, num_prompt_tokens=2))
"""


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=ENV,
        timeout=600,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def bare(folder) -> Path:
    """The `bin` folder of an environment in which only `pip install <repository>` was run."""
    made = call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    scripts = folder / "venv" / "bin"
    done = call(scripts / "python", "-m", "pip", "install", REPOSITORY, cwd=folder)
    assert done.returncode == 0, done.stderr
    return scripts


@pytest.fixture(scope="module")
def wheel(bare, folder) -> ZipFile:
    """The wheel that the repository builds."""
    done = call(
        bare / "python", "-m", "pip", "wheel", "--no-deps", "-w", "wheels", REPOSITORY, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "wheels").glob("routebook-*.whl")
    return ZipFile(path)


def test_nothing_but_three_small_packages_is_brought(bare, folder):
    done = call(bare / "python", "-m", "pip", "list", "--format=json", cwd=folder)
    names = {package["name"].lower() for package in json.loads(done.stdout)}
    assert names - {"pip", "setuptools"} == {"routebook", "numpy", "msgspec", "zstandard"}


def test_records_are_written_and_inspected_without_torch(bare, folder):
    wrote = call(bare / "python", "-c", WRITE_A_RECORD, cwd=folder)
    assert wrote.returncode == 0, wrote.stderr
    seen = call(bare / "routebook", "inspect", "bare.routes", "--json", cwd=folder)
    assert (seen.returncode, seen.stderr) == (0, "")
    report = json.loads(seen.stdout)
    assert (report["layer_ids"], report["num_experts"], report["top_k"]) == ([1, 2], 8, 2)
    assert [layer["counts"] for layer in report["layers"]] == [
        [3, 1, 0, 0, 1, 0, 1, 0],
        [0, 1, 2, 1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    "command", [("generate", "tiny", "--prompt", "a"), ("demo", "--out", "demo.routes")]
)
def test_the_engine_s_commands_name_the_extra(bare, folder, command):
    done = call(bare / "routebook", *command, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "pip install 'routebook[engine]'" in line
    assert not (folder / "demo.routes").exists()


def test_the_engine_s_class_names_the_extra(bare, folder):
    done = call(bare / "python", "-c", "from routebook import LLM", cwd=folder)
    assert done.returncode == 1
    assert "pip install 'routebook[engine]'" in done.stderr.splitlines()[-1]


def test_the_wheel_holds_the_types_the_model_and_the_licence(wheel):
    names = set(wheel.namelist())
    tiny = "routebook/models/tiny"
    files = ("config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md")
    assert {"routebook/py.typed", *(f"{tiny}/{name}" for name in files)} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for name in files:
        source = REPOSITORY / "src" / tiny / name
        assert wheel.read(f"{tiny}/{name}") == source.read_bytes()


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"routebook"}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]
