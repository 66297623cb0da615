"""`routebook drift`: a table, JSON, a plot, and an exit status that can be a gate."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest

from routebook.cli.main import main
from routebook.routes import read_routes
from tests.cli.conftest import PROMPTS
from tests.cli.records import with_meta, write


@pytest.fixture(scope="session")
def coarse(tmp_path_factory):
    """Sampled completions in bfloat16."""
    path = tmp_path_factory.mktemp("coarse") / "coarse.routes"
    prompts = [f"--prompt={prompt}" for prompt in (*PROMPTS, "It is a truth", "And God said")]
    options = [
        "--dtype",
        "bfloat16",
        "--max-tokens",
        "90",
        "--ignore-eos",
        "--seed",
        "1",
        "--n",
        "2",
    ]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main(["generate", "tiny", *prompts, *options, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def shifted(coarse, tmp_path_factory):
    """The same rows, one position late."""
    path = tmp_path_factory.mktemp("shifted") / "shifted.routes"
    return write(
        path,
        (
            replace(s, record=replace(s.record, ids_TLK=np.roll(s.record.ids_TLK, 1, axis=0)))
            for s in read_routes(coarse)
        ),
    )


def test_an_honest_record_passes(run, coarse):
    done = run("drift", coarse, "--model", "tiny")
    lines = done.out.splitlines()
    assert lines[0] == f"{coarse}: rollout in bfloat16, trainer in float32"
    assert "0.0% of tokens without a usable row" in lines[1]
    assert lines[-1].startswith("pass: replay brings the KL down")
    assert not any(line.startswith("fault") for line in lines)
    assert done.status == 0
    assert sum(line.split()[0] in "012345" for line in lines if line.strip()) >= 6


def test_shifted_rows_fail_and_are_named(run, shifted):
    done = run("drift", shifted, "--model", "tiny")
    assert done.status == 1
    assert "fault: the rows are shifted by -1 rows" in done.out
    assert done.out.splitlines()[-1].startswith("FAIL")


def test_json_holds_the_whole_report(run, coarse, shifted):
    done = run("drift", coarse, "--model", "tiny", "--json")
    report = json.loads(done.out)
    assert (done.status, report["passes"], report["faults"]) == (0, True, [])
    assert (report["rollout_dtype"], report["trainer_dtype"]) == ("bfloat16", "float32")
    assert [layer["layer_id"] for layer in report["layers"]] == list(range(6))
    assert report["native"]["kl"] > report["replayed"]["kl"] > 0
    assert len(report["offsets"]) == len(report["offsets"][0]) == 5
    report = json.loads(run("drift", shifted, "--model", "tiny", "--json").out)
    (fault,) = report["faults"]
    assert (fault["type"], fault["rows"], fault["layers"]) == ("shift", -1, 0)
    assert report["offsets"][1][2] > 0.9 > report["offsets"][2][2]


class Page(HTMLParser):
    """Counts tags and refuses one that loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert tag not in ("script", "link", "img")
        assert not {"src", "href"} & {name for name, _ in attrs}


def test_the_plot_is_one_page_that_needs_nothing_else(run, shifted, tmp_path):
    path = tmp_path / "drift.html"
    assert run("drift", shifted, "--model", "tiny", "--html", path).status == 1
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.tags.count("table") == 3
    assert "shifted by -1 rows" in text
    assert text.count('class="bar"') == 4 + 6
    assert text.count("<td style=") == 25


def test_the_same_number_format_has_no_gap_left(run, record):
    """The engine in float32 and transformers in float32 agree."""
    done = run("drift", record, "--model", "tiny", "--json")
    report = json.loads(done.out)
    assert done.status == 0
    assert report["different_pairs"] == report["replayed"]["kl"] == 0.0
    assert report["verdict"].startswith("pass: the trainer chooses the recorded experts by itself")


def test_mistakes_get_one_line(run, record, samples, tmp_path, other_model):
    assert (
        "does not end in .html"
        in run("drift", record, "--model", "tiny", "--html", tmp_path / "x.png").error
    )
    assert "cannot read" in run("drift", tmp_path / "none.routes", "--model", "tiny").error
    assert "give the model that made it" in run("drift", record, "--model", other_model).error
    unknown = write(tmp_path / "u.routes", [with_meta(samples[0], dtype="float8")])
    assert "made in float8; drift needs one" in run("drift", unknown, "--model", "tiny").error
    mixed = write(tmp_path / "m.routes", [samples[0], with_meta(samples[1], dtype="bfloat16")])
    assert "drift needs one number format" in run("drift", mixed, "--model", "tiny").error
    rows = samples[0].record
    bare = replace(samples[0], record=rows.slice(rows.stop, rows.stop))
    empty = write(tmp_path / "e.routes", [bare])
    done = run("drift", empty, "--model", "tiny")
    assert (done.status, "no sample with rows" in done.error) == (2, True)
