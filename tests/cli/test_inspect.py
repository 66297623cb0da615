"""`routebook inspect`: its figures against figures computed here, from the records alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from html.parser import HTMLParser

import pytest

from routebook.cli.main import main
from tests.cli.records import with_meta, without_rows, write


@pytest.fixture(scope="module")
def path(samples, tmp_path_factory):
    """The shared record, with two rows of its second sample absent."""
    folder = tmp_path_factory.mktemp("inspect")
    odd = with_meta(without_rows(samples[1], [3, 30]), request_id="<b>&1")
    return write(folder / "odd <i> & name.routes", [samples[0], odd])


@pytest.fixture(scope="module")
def picks(samples):
    """Picks of each layer, counted one by one, over valid rows only."""
    counts = [Counter() for _ in range(6)]
    for sample, absent in zip(samples, (set(), {3, 30}), strict=True):
        for position, row in enumerate(sample.record.ids_TLK.tolist()):
            if position not in absent:
                for layer, ids in enumerate(row):
                    counts[layer].update(ids)
    return counts


def entropy(counter):
    total = counter.total()
    return -sum(n / total * math.log2(n / total) for n in counter.values())


def test_the_json_report(run, path, samples, picks):
    done = run("inspect", path, "--json")
    assert done.status == 0
    report = json.loads(done.out)
    num_rows = sum(len(s.token_ids) - 1 for s in samples)
    assert report["file"] == str(path)
    assert (report["num_samples"], report["num_rows"], report["num_absent_rows"]) == (
        2,
        num_rows,
        2,
    )
    assert report["layer_ids"] == [0, 1, 2, 3, 4, 5]
    assert report["num_hidden_layers"] == 6
    assert (report["num_experts"], report["top_k"], report["dtype"]) == (16, 4, "uint8")
    assert report["weight_versions"] == [0]
    assert sum(report["rows_by_origin"].values()) == num_rows - 2
    for layer, counter in zip(report["layers"], picks, strict=True):
        assert layer["counts"] == [counter[expert] for expert in range(16)]
        assert layer["entropy_bits"] == pytest.approx(entropy(counter))
        assert layer["relative_entropy"] == pytest.approx(entropy(counter) / 4)
        assert counter[layer["busiest_expert"]] == max(counter.values())
        assert layer["busiest_over_mean"] == pytest.approx(
            max(counter.values()) / (counter.total() / 16)
        )
        assert layer["unused_experts"] == 16 - len(counter)


def test_the_json_report_of_each_sample(run, path, samples):
    first, second = json.loads(run("inspect", path, "--json").out)["samples"]
    num_prompt, num_tokens = samples[0].num_prompt_tokens, len(samples[0].token_ids)
    assert first["meta"] == samples[0].meta
    assert (first["num_prompt_tokens"], first["num_tokens"]) == (num_prompt, num_tokens)
    assert (first["start"], first["num_rows"], first["num_absent_rows"]) == (0, num_tokens - 1, 0)
    assert first["provenance"] == [
        [0, num_prompt, 0, "prefill"],
        [num_prompt, num_tokens - 1, 0, "decode"],
    ]
    assert second["num_absent_rows"] == 2
    last = len(samples[1].token_ids) - 1
    assert second["provenance"] == [
        [0, 3, 0, "decode"],
        [4, 30, 0, "decode"],
        [31, last, 0, "decode"],
    ]


def test_the_report_for_people(run, path, samples, picks):
    lines = run("inspect", path).out.splitlines()
    num_rows = sum(len(s.token_ids) - 1 for s in samples)
    assert lines[0] == f"{path}: 2 samples, {num_rows} rows (2 absent)"
    assert "6 MoE layers of 6, 16 experts, top-4, uint8" in lines[1]
    table = [line.split() for line in lines if line.strip()[:1].isdigit() and "%" in line]
    assert [int(row[0]) for row in table] == list(range(6))
    for row, counter in zip(table, picks, strict=True):
        assert row[1] == f"{entropy(counter):.3f}"
        assert row[2] == f"{entropy(counter) / 4:.1%}"
        assert counter[int(row[3])] == max(counter.values())
        assert row[5] == str(16 - len(counter))
    assert "decode[0,3)v0 decode[4,30)v0" in lines[-1]


def test_rows_of_a_shared_prefix_say_so(run, record):
    last = run("inspect", record).out.splitlines()[-1]
    assert "prefix_cache[0,16)v0" in last


class Page(HTMLParser):
    """Collects the table of a page, and holds every tag to being closed in its turn."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.tags = [], [], Counter()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append([dict(attrs), ""])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1][1] += data


def test_the_picture(run, path, picks, tmp_path):
    picture = tmp_path / "load.html"
    done = run("inspect", path, "--html", picture)
    assert done.status == 0
    page = Page(picture.read_text(encoding="utf-8"))
    head, *layers = page.rows
    assert [text for attrs, text in head if attrs.get("class") == "expert"] == [
        str(expert) for expert in range(16)
    ]
    assert len(layers) == 6
    for layer, (cells, counter) in enumerate(zip(layers, picks, strict=True)):
        assert cells[0][1] == str(layer)
        loads = [cell for cell in cells if "load" in cell[0].get("class", "").split()]
        assert len(loads) == 16
        for expert, (attrs, text) in enumerate(loads):
            assert attrs["title"] == f"layer {layer}, expert {expert}: {counter[expert]} picks"
            assert text == f"{counter[expert] / (counter.total() / 16):.1f}"
            assert ("unused" in attrs["class"].split()) == (counter[expert] == 0)
    assert "i" not in page.tags, "the file's name was taken for markup"
    assert "odd &lt;i&gt; &amp; name.routes" in picture.read_text(encoding="utf-8")


def test_a_darker_cell_is_a_busier_expert(run, path, tmp_path):
    picture = tmp_path / "load.html"
    run("inspect", path, "--html", picture)
    cells = [
        (int(attrs["title"].split()[-2]), float(attrs["style"].split("75% ")[1].split("%")[0]))
        for row in Page(picture.read_text()).rows[1:2]
        for attrs, _ in row
        if "load" in attrs.get("class", "")
    ]
    by_picks = sorted(cells)
    lightness = [light for _, light in by_picks]
    assert lightness == sorted(lightness, reverse=True)
    assert lightness[0] > lightness[-1]


def test_a_record_without_any_valid_row_is_refused(run, samples, tmp_path):
    hollow = without_rows(samples[0], range(samples[0].record.num_rows))
    path = write(tmp_path / "hollow.routes", [hollow])
    done = run("inspect", path)
    assert done.status == 2
    assert f"{path} holds no valid row" in done.error


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    name, number = capsys.readouterr().out.split()
    assert name == "routebook"
    assert number[0].isdigit()
