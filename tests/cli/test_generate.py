"""`routebook generate`."""

from __future__ import annotations

import json

import pytest

from routebook.cli.generate import read_prompts
from routebook.errors import RequestError
from routebook.routes import Origin, read_routes
from tests.cli.conftest import PROMPTS

GREEDY = ("--temperature", "0", "--max-tokens", "2")


def test_a_sum_is_completed(run):
    done = run("generate", "tiny", "--prompt", "17+25=", *GREEDY)
    assert (done.status, done.out) == (0, "[0.0] 17+25=42\n")


def test_the_record_holds_every_row_of_what_was_printed(record, samples, run):
    options = ("--dtype", "float32", "--temperature", "0", "--max-tokens", "5")
    done = run("generate", "tiny", *(f"--prompt={p}" for p in PROMPTS), *options)
    assert done.out == "".join(
        f"[{s.meta['request_id']}] {s.meta['prompt']}{s.meta['text']}\n" for s in samples
    )
    assert [s.meta["prompt"] for s in samples] == list(PROMPTS)
    for sample in samples:
        assert sample.record.num_rows == len(sample.token_ids) - 1
        assert len(sample.sampled_token_ids) == 5
        assert sample.record.complete
        assert sample.meta["model"] == "tiny"
        assert sample.meta["dtype"] == "float32"
    assert Origin.PREFIX_CACHE in {span.origin for span in samples[1].record.provenance}
    assert samples[0].meta["text"].startswith("42")
    assert samples[1].meta["text"].startswith("81")


def test_prompts_come_one_per_line(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("17+25=\n\n  \n40+41=\n")
    done = run("generate", "tiny", "--prompts-file", path, *GREEDY)
    assert done.out.splitlines() == ["[0.0] 17+25=42", "[1.0] 40+41=81"]


def test_json_lines_hold_texts_or_token_ids(run, tmp_path, samples):
    path = tmp_path / "prompts.jsonl"
    ids = samples[1].prompt_token_ids.tolist()
    path.write_text(f"{json.dumps('8+5=13' + chr(10) + '17+25=')}\n{json.dumps(ids)}\n")
    done = run("generate", "tiny", "--prompts-file", path, *GREEDY)
    assert done.out == "[0.0] 8+5=13\n17+25=42\n[1.0] 81\n"


def test_only_line_feeds_part_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff"a\u2028b\u0085"\r\n"c"\r\n'.encode())
    assert read_prompts(path) == ["a\u2028b\u0085", "c"]


def test_a_file_without_prompts_is_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    with pytest.raises(RequestError, match="holds no prompt"):
        read_prompts(path)


def test_options_do_what_they_say(run, tmp_path):
    out = tmp_path / "two.routes"
    flags = ("--n", "2", "--max-tokens", "40", "--seed", "5", "--stop", "\n", "--block-size", "4")
    start = ("--routed-experts-prompt-start", "3", "--dtype", "float64")
    done = run("generate", "tiny", "--prompt", "17+25=", "--out", out, *flags, *start)
    assert done.out == f"[0.0] 17+25=42\n[0.1] 17+25=42\nwrote {out}\n"
    first, second = read_routes(out)
    assert [s.meta["request_id"] for s in (first, second)] == ["0.0", "0.1"]
    for sample in (first, second):
        assert sample.record.start == 3
        assert sample.meta["dtype"] == "float64"
        assert sample.meta["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_text(run):
    prose = ("generate", "tiny", "--prompt", "It is", "--max-tokens", "12")
    texts = [run(*prose, "--seed", seed).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_log_probabilities_are_printed_when_asked_for(run):
    done = run("generate", "tiny", "--prompt", "17+25=", *GREEDY, "--logprobs", "2")
    text, four, two = done.out.splitlines()
    assert text == "[0.0] 17+25=42"
    for line, token in ((four, "'4'"), (two, "'2'")):
        sampled, likeliest = line.split("likeliest:")
        assert sampled.split()[0] == token
        assert -0.1 < float(sampled.split()[1]) <= 0
        names = [entry.split()[0] for entry in likeliest.split(", ")]
        assert names[0] == token
        assert len(names) == 2


def test_without_a_tokenizer_ids_are_printed(run, other_model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2, 3]\n")
    done = run("generate", other_model, "--prompts-file", path, *GREEDY, "--logprobs", "0")
    head, *logprobs = done.out.splitlines()
    ids = head.removeprefix("[0.0] ").split()
    assert [0 <= int(token_id) < 64 for token_id in ids] == [True, True]
    assert [line.split()[0] for line in logprobs] == ids


def test_a_file_that_was_there_is_replaced_whole(run, tmp_path):
    out = tmp_path / "x.routes"
    out.write_bytes(b"older")
    assert run("generate", "tiny", "--prompt", "17+25=", *GREEDY, "--out", out).status == 0
    assert len(list(read_routes(out))) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_a_full_disk_at_the_end_loses_no_text(run, tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    out = tmp_path / "x.routes"
    out.write_bytes(b"older")
    monkeypatch.setattr("pathlib.Path.replace", full)
    done = run("generate", "tiny", "--prompt", "17+25=", *GREEDY, "--out", out)
    assert (done.status, done.out) == (2, "[0.0] 17+25=42\n")
    assert f"cannot write {out}: No space left on device" in done.err.splitlines()[-1]
    assert [(p, p.read_bytes()) for p in tmp_path.iterdir()] == [(out, b"older")]


def test_what_transformers_says_of_its_own_accord_is_not_shown(run):
    done = run("generate", "tiny", "--prompt", "17+25=", *GREEDY)
    lines = [line for line in done.err.replace("\r", "\n").splitlines() if line.strip()]
    assert lines
    assert all(line.startswith("generate: ") for line in lines)
