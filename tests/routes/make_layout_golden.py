"""Answers of megatron-core and verl: `python -m tests.routes.make_layout_golden` makes them anew.

Needs megatron-core (0.16 or newer) and verl (0.9.1), both without their dependencies, and torch. The answers are kept
in `data/layout_golden.json` as runs `[first tag, rows]`: small enough to read, and independent of what is installed
where they are compared.
"""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.routes import layout_cases, layout_peers

PATH = Path(__file__).parent / "data" / "layout_golden.json"
NUM_CASES = 100
NUM_PADDED = 30
SEED = 7


def runs(tags: list[int]) -> list[list[int]]:
    """Stretches of consecutive tags, or of padding, as first tag and number of rows."""
    keys = [-1 if tag < 0 else tag - at for at, tag in enumerate(tags)]
    groups = [list(group) for _, group in groupby(zip(tags, keys, strict=True), lambda t: t[1])]
    return [[group[0][0], len(group)] for group in groups]


def make() -> dict[str, Any]:
    rng = random.Random(SEED)
    made: dict[str, Any] = {
        "versions": {name: version(name) for name in ("megatron-core", "verl")},
        "stages": [],
        "packed": [],
        "padded": [],
    }
    while len(made["stages"]) < NUM_CASES:
        case = layout_cases.stage_case(rng)
        try:
            answer = layout_peers.megatron_stages(case)
        except layout_peers.PeerCrashError:
            continue
        made["stages"].append([case, answer])
    for _ in range(NUM_CASES):
        case = layout_cases.packed_case(rng)
        made["packed"].append([case, [runs(tags) for tags in layout_peers.verl_packed(case)]])
    for _ in range(NUM_PADDED):
        case = layout_cases.padded_case(rng)
        made["padded"].append([case, [runs(tags) for tags in layout_peers.megatron_padded(case)]])
    return made


def write(made: dict[str, Any]) -> None:
    """One case a line."""
    parts = [f'"versions": {json.dumps(made["versions"])}']
    for name in ("stages", "packed", "padded"):
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in made[name])
        parts.append(f'"{name}": [\n{lines}\n]')
    PATH.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    write(make())
    print(PATH)
