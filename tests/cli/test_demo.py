"""`routebook demo`."""

from __future__ import annotations

import re

import pytest

from routebook.cli.demo import PREFIX, prompts
from routebook.routes import Origin, read_routes
from tests.cli.conftest import Done


@pytest.fixture
def demo(run, tmp_path) -> tuple[Done, object]:
    out = tmp_path / "new folder" / "demo.routes"
    return run("demo", "--out", out), out


def test_the_demo_keeps_its_promise(demo):
    done, out = demo
    assert done.status == 0
    samples = list(read_routes(out))
    n = sum(len(sample.token_ids) - 1 for sample in samples)
    *_, blank, picture, verified = done.out.splitlines()
    assert blank == ""
    assert picture == f"picture of expert load: {out.with_suffix('.html')}"
    assert verified == f"verified: {n} rows x 6 layers, {n} equal, 0 different"
    assert out.with_suffix(".html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(p.name for p in out.parent.iterdir()) == ["demo.html", "demo.routes"]


def test_its_prompts_share_a_prefix_whose_rows_come_from_one_of_them(demo):
    _, out = demo
    samples = [s for s in read_routes(out) if s.meta["prompt"].startswith(PREFIX)]
    assert len(samples) >= 10
    assert len({sample.num_prompt_tokens for sample in samples}) >= 8
    assert {sample.meta["dtype"] for sample in read_routes(out)} == {"float32"}
    computed, *hits = samples
    assert Origin.PREFIX_CACHE not in {span.origin for span in computed.record.provenance}
    for sample in hits:
        first = sample.record.provenance[0]
        assert (first.start, first.stop, first.origin) == (0, 32, Origin.PREFIX_CACHE)


def test_completions_can_be_told_from_prompts(demo):
    done, out = demo
    shown = re.split(r"^\[\d+\] ", done.out, flags=re.MULTILINE)[1:]
    samples = list(read_routes(out))
    assert len(shown) == len(samples) == len(prompts())
    for block, sample in zip(shown, samples, strict=True):
        tail, completion = block.split("\nwrote ")[0].split(">>>")
        assert tail.split() == sample.meta["prompt"].removeprefix(PREFIX).split()
        assert completion.split() == sample.meta["text"].split()
    assert done.out.count(PREFIX.strip()) == 1
    assert max(map(len, done.out.split("\nwrote ")[0].split("\n")[2:])) <= 100


def test_the_sum_is_right(demo):
    _, out = demo
    *_, sums = read_routes(out)
    assert sums.meta["prompt"].endswith("17+25=")
    assert sums.meta["text"].startswith("42\n")


def test_it_says_the_same_every_time(run, tmp_path):
    texts = [run("demo", "--out", tmp_path / "demo.routes").out for _ in range(2)]
    assert texts[0] == texts[1]
