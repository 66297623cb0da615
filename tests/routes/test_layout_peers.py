"""Our stages and rows against megatron-core's and verl's own functions, installed or by stored answers."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest

from tests.routes import layout_cases, layout_peers
from tests.routes.layout_cases import Case
from tests.routes.make_layout_golden import PATH, runs

GOLDEN = json.loads(PATH.read_text())
LIVE_CASES = 2500


def loses_tokens(case: Case, answers: list[list[int]]) -> bool:
    """Whether a cut leaves a token out, or a piece that tensor-parallel ranks cannot share or zigzag halve."""
    tokens = sorted(tag for tags in answers for tag in tags if tag >= 0)
    expected = [layout_cases.TAG * i + p for i, n in enumerate(case["lengths"]) for p in range(n)]
    zigzag = case["cp"] > 1 and not case["contiguous"]
    odd = any(len(tags) % case["tp"] or (zigzag and len(tags) % 2) for tags in answers)
    return tokens != expected or odd


def test_stages_are_those_that_megatron_answered():
    assert sum(answer is not None for _, answer in GOLDEN["stages"]) > 50
    for case, answer in GOLDEN["stages"]:
        assert layout_cases.our_stages(case) == answer, case


def test_packed_rows_are_those_that_verl_answered():
    kept = 0
    for case, expected in GOLDEN["packed"]:
        ours = layout_cases.our_packed(case)
        kept += ours is not None
        if ours is not None:
            assert [runs(tags) for tags in ours] == expected, case
    assert kept > 60


def test_padded_rows_are_those_that_megatron_answered():
    for case, expected in GOLDEN["padded"]:
        assert [runs(tags) for tags in layout_cases.our_padded(case)] == expected, case


def need(load) -> None:
    try:
        load()
    except ImportError as error:
        pytest.skip(f"compared with stored answers only: {error}")


def test_stages_are_those_of_the_installed_megatron():
    need(layout_peers.megatron)
    rng, compared = random.Random(1), 0
    while compared < LIVE_CASES:
        case = layout_cases.stage_case(rng)
        try:
            answer = layout_peers.megatron_stages(case)
        except layout_peers.PeerCrashError:
            continue
        assert layout_cases.our_stages(case) == answer, case
        compared += answer is not None


def test_packed_rows_are_those_of_the_installed_verl():
    need(layout_peers.verl)
    rng, compared, refused = random.Random(2), 0, 0
    while compared < LIVE_CASES:
        case = layout_cases.packed_case(rng)
        answer, ours = layout_peers.verl_packed(case), layout_cases.our_packed(case)
        assert ours == (None if loses_tokens(case, answer) else answer), case
        compared += ours is not None
        refused += ours is None
    assert refused > 100


def test_padded_rows_are_those_of_the_installed_megatron():
    need(layout_peers.megatron)
    draw = partial(layout_cases.padded_case, random.Random(3))
    for case in [draw() for _ in range(LIVE_CASES)]:
        assert layout_cases.our_padded(case) == layout_peers.megatron_padded(case), case
