"""The layers of the package: which part may import what, over all of its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import routebook

ROOT = Path(routebook.__file__).parent
HEAVY = ("torch", "transformers", "vllm", "starlette", "fastapi", "uvicorn", "httpx")

# What a part may import from outside of Python's own library, and which other parts.
ONLY = {
    "errors": (set(), set()),
    "config": (set(), {"errors"}),
    "routes": ({"numpy", "msgspec", "pybase64", "zstandard"}, {"routes", "config", "errors"}),
    "ledger": ({"numpy", "msgspec", "zstandard"}, {"ledger", "routes", "config", "errors"}),
}
# What a part must not import, where the rest is free.
NEVER = {
    "capture": {"routebook.engine", "routebook.hosts", "routebook.server", "transformers", "vllm"},
    "engine": {
        *("routebook.hosts", "routebook.server", "routebook.client", "routebook.cli"),
        *("vllm", "fastapi", "starlette", "uvicorn", "httpx"),
    },
    "server": {"routebook.hosts", "routebook.client", "routebook.cli", "torch", "vllm"},
    "client": {"routebook.server", "routebook.cli", "torch", "transformers", "vllm"},
    "replay": {
        *("routebook.engine", "routebook.server", "routebook.client", "routebook.cli"),
        *("routebook.hosts", "vllm"),
    },
    "hosts": {"routebook.engine", "routebook.server", "routebook.cli"},
}
# The ledger's conformance suite ships with the package and is made of tests.
TEST_TOOLS = {"pytest", "hypothesis"}


def imports(source: str, package: str) -> Iterator[str]:
    """Full names of all that a module imports anywhere, functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*base, node.module or ""] if node.level else [node.module or ""])
            yield from (f"{module.rstrip('.')}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def forbidden(part: str, name: str) -> bool:
    """Whether this part of the package may not import this name."""
    names = name.split(".")
    if part in ONLY:
        third_party, parts = ONLY[part]
        if names[0] == "routebook":
            return len(names) < 2 or names[1] not in parts
        return names[0] not in third_party | set(sys.stdlib_module_names)
    return any(f"{name}.".startswith(f"{never}.") for never in NEVER.get(part, ()))


def violations(path: Path) -> list[str]:
    package = ".".join(["routebook", *path.relative_to(ROOT).parent.parts])
    part = part_of(path)
    allowed = TEST_TOOLS if path.is_relative_to(ROOT / "ledger" / "conformance") else set()
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for name in imports(path.read_text(), package)
        if forbidden(part, name) and name.split(".")[0] not in allowed
    ]


def test_no_module_imports_across_a_layer():
    paths = sorted(ROOT.rglob("*.py"))
    assert {"routes", "ledger", "capture", "engine"} <= {part_of(path) for path in paths}
    assert [line for path in paths for line in violations(path)] == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("routes", "import torch"),
        ("routes", "import torch.nn.functional as F"),
        ("routes", "from transformers import AutoModel"),
        ("routes", "def f():\n    import torch"),
        ("routes", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("routes", "from routebook.ledger.base import Ledger"),
        ("routes", "from routebook import LLM"),
        ("routes", "import routebook"),
        ("routes", "from ..engine import llm"),
        ("routes", "from .. import capture"),
        ("ledger", "from routebook import capture"),
        ("ledger", "import routebook.engine.llm"),
        ("ledger", "import pytest"),
        ("capture", "from routebook.engine.config import ModelConfig"),
        ("capture", "from routebook import engine"),
        ("capture", "import transformers"),
        ("capture", "from ..engine.llm import LLM"),
        ("engine", "from routebook.hosts.vllm import worker"),
        ("engine", "import vllm"),
        ("hosts", "from routebook.engine.llm import LLM"),
        ("config", "import numpy"),
    ],
)
def test_an_import_across_a_layer_is_seen(part, source):
    assert any(forbidden(part, name) for name in imports(source, f"routebook.{part}"))


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("routes", "import os.path, numpy as np"),
        ("routes", "from . import schema"),
        ("routes", "from .schema import RouteSchema"),
        ("ledger", "from routebook.routes import Origin"),
        ("ledger", "from ..routes.schema import RouteSchema"),
        ("engine", "from routebook.capture.capturer import Capturer"),
        ("engine", "import vllm_config_reader"),
    ],
)
def test_an_import_within_the_lines_is_let_through(part, source):
    assert not any(forbidden(part, name) for name in imports(source, f"routebook.{part}"))


@pytest.mark.parametrize("module", ["routebook", "routebook.routes", "routebook.ledger"])
def test_the_light_parts_load_nothing_heavy(module):
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []
