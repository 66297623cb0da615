"""Every mistake of a user: status 2, one line that names value and remedy, and nothing lost."""

from __future__ import annotations

import shutil

import pytest

PROMPT = ("generate", "tiny", "--prompt", "17+25=")
TO_KEPT = (*PROMPT, "--out", "kept.routes")


@pytest.fixture
def folder(tmp_path, monkeypatch, record, dense_model, other_model):
    """The working directory of a user: good and bad files, and a record that must survive."""
    monkeypatch.chdir(tmp_path)
    good = record.read_bytes()
    damaged = bytearray(good)
    damaged[200] ^= 0xFF
    files = {
        "kept.routes": b"a record of last week",
        "good.routes": good,
        "empty.routes": b"",
        "truncated.routes": good[: len(good) - 7],
        "damaged.routes": bytes(damaged),
        "other.routes": b"not a record at all, though its name says so" * 4,
        "outside.jsonl": b"[1, 2]\n[1, 2048]\n",
        "negative.jsonl": b"[-1]\n",
        "no_tokens.jsonl": b"[]\n",
        "object.jsonl": b'"fine"\n{"prompt": "17+25="}\n',
        "bool.jsonl": b"[true]\n",
        "ids.jsonl": b"[1, 2, 3]\n",
        "long.txt": b"1+1=2 " * 400,
        "blank.txt": b"\n  \n",
        "latin.txt": "caf\u00e9\n".encode("latin-1"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name, model in (("dense", dense_model), ("other", other_model)):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_folder.routes").mkdir()
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# What is typed, and words of the answer: the value, then the remedy.
MISTAKES = {
    # files to read
    "inspect, no file": (
        ("inspect", "gone.routes"),
        ("gone.routes", "No such file", "name a file"),
    ),
    "inspect, a folder": (("inspect", "a_folder"), ("a_folder", "Is a directory", "name a file")),
    "inspect, empty": (("inspect", "empty.routes"), ("empty.routes is empty", "not written by")),
    "inspect, truncated": (
        ("inspect", "truncated.routes"),
        ("truncated.routes: frame 2", "the file ends", "1 samples before it can be read"),
    ),
    "inspect, damaged": (
        ("inspect", "damaged.routes"),
        ("damaged.routes: frame 1", "checksum", "copy the file again"),
    ),
    "inspect, no record": (
        ("inspect", "other.routes"),
        ("other.routes: frame 1", "no frame", "write the file with"),
    ),
    "verify, no file": (
        ("verify", "gone.routes", "--model", "tiny"),
        ("gone.routes", "name a file"),
    ),
    "verify, a folder": (("verify", "a_folder", "--model", "tiny"), ("a_folder", "name a file")),
    "verify, truncated": (
        ("verify", "truncated.routes", "--model", "tiny"),
        ("truncated.routes: frame 2", "copy the file again"),
    ),
    # files to write
    "another ending": ((*PROMPT, "--out", "x.txt"), ("x.txt does not end in .routes", "name")),
    "no folder": ((*PROMPT, "--out", "nowhere/x.routes"), ("no folder nowhere", "make it first")),
    "out is a folder": (
        (*PROMPT, "--out", "a_folder.routes"),
        ("a_folder.routes is a folder", "name a file in it"),
    ),
    "out cannot be made": (
        (*PROMPT, "--out", "/proc/x.routes"),
        ("cannot write /proc/x.routes", "name a place that can be written"),
    ),
    "demo, another ending": (("demo", "--out", "x.txt"), ("x.txt does not end in .routes", "name")),
    "demo, a file for a folder": (
        ("demo", "--out", "good.routes/x.routes"),
        ("cannot write good.routes/x.routes", "name a place"),
    ),
    "picture, no folder": (
        ("inspect", "good.routes", "--html", "nowhere/x.html"),
        ("cannot write nowhere/x.html", "No such file", "name a place"),
    ),
    "picture over a record": (
        ("inspect", "good.routes", "--html", "good.routes"),
        ("good.routes does not end in .html", "name the picture"),
    ),
    # models
    "unknown model": (
        ("generate", "nosuch", "--prompt", "a", "--out", "kept.routes"),
        ("no model 'nosuch'", "no folder", "tiny", "hub"),
    ),
    "hub out of reach": (
        ("generate", "some/model", "--prompt", "a", "--out", "kept.routes"),
        ("no model 'some/model'", "tiny", "hub did not give it"),
    ),
    "a folder without a model": (
        ("generate", "a_folder", "--prompt", "a", "--out", "kept.routes"),
        ("'a_folder' holds no config.json", "name the folder of a model"),
    ),
    "a dense model": (
        ("generate", "dense", "--prompts-file", "ids.jsonl", "--out", "kept.routes"),
        ("LlamaForCausalLM", "no mixture-of-experts layer"),
    ),
    "verify, unknown model": (
        ("verify", "good.routes", "--model", "nosuch"),
        ("no model 'nosuch'", "tiny"),
    ),
    "verify, another model": (
        ("verify", "good.routes", "--model", "other"),
        ("made by model 'tiny'", "not by 'other'", "give the model that made it"),
    ),
    "text without a tokenizer": (
        ("generate", "other", "--prompt", "a", "--out", "kept.routes"),
        ("no tokenizer", "give token ids"),
    ),
    # prompts
    "no prompt": (("generate", "tiny"), ("--prompt --prompts-file is required", "--help")),
    "empty prompt": (
        (*TO_KEPT, "--prompt", ""),
        ("prompt 1: the prompt is empty", "give at least one token"),
    ),
    "long prompt": (
        ("generate", "tiny", "--prompts-file", "long.txt", "--out", "kept.routes"),
        ("prompt 0: the prompt has 2400 tokens", "max_model_len=2048", "2047 at most"),
    ),
    "prompt is not UTF-8": ((*TO_KEPT, "--prompt", "a\udcff"), ("prompt 1", "write it in UTF-8")),
    "no prompts file": (
        ("generate", "tiny", "--prompts-file", "gone.txt", "--out", "kept.routes"),
        ("gone.txt", "No such file", "name a text file"),
    ),
    "prompts file is blank": (
        ("generate", "tiny", "--prompts-file", "blank.txt", "--out", "kept.routes"),
        ("blank.txt holds no prompt", "write one per line"),
    ),
    "prompts file is not UTF-8": (
        ("generate", "tiny", "--prompts-file", "latin.txt", "--out", "kept.routes"),
        ("latin.txt", "save it as UTF-8"),
    ),
    "token id outside": (
        ("generate", "tiny", "--prompts-file", "outside.jsonl", "--out", "kept.routes"),
        ("prompt 1: token id 2048", "outside the vocabulary of 2048"),
    ),
    "negative token id": (
        ("generate", "tiny", "--prompts-file", "negative.jsonl", "--out", "kept.routes"),
        ("prompt 0: token id -1", "outside the vocabulary of 2048"),
    ),
    "no token ids": (
        ("generate", "tiny", "--prompts-file", "no_tokens.jsonl", "--out", "kept.routes"),
        ("prompt 0: the prompt is empty", "give at least one token"),
    ),
    "a line of something else": (
        ("generate", "tiny", "--prompts-file", "object.jsonl", "--out", "kept.routes"),
        ("object.jsonl, line 2", "neither a JSON text nor a list of token ids"),
    ),
    "a truth is no token": (
        ("generate", "tiny", "--prompts-file", "bool.jsonl", "--out", "kept.routes"),
        ("bool.jsonl, line 1", "list of token ids"),
    ),
    # options
    "max_tokens": ((*TO_KEPT, "--max-tokens", "0"), ("max_tokens=0", "at least 1")),
    "max_tokens in words": (
        (*TO_KEPT, "--max-tokens", "ten"),
        ("--max-tokens='ten'", "whole number"),
    ),
    "max_tokens in parts": (
        (*TO_KEPT, "--max-tokens", "1.5"),
        ("--max-tokens='1.5'", "whole number"),
    ),
    "temperature in words": (
        (*TO_KEPT, "--temperature", "hot"),
        ("--temperature='hot'", "a number"),
    ),
    "start beyond the prompt": (
        (*TO_KEPT, "--routed-experts-prompt-start", "7"),
        ("routed_experts_prompt_start=7", "beyond the prompt of 6 tokens"),
    ),
    "negative start": (
        (*TO_KEPT, "--routed-experts-prompt-start", "-1"),
        ("routed_experts_prompt_start=-1", "at least 0"),
    ),
    "dtype": ((*TO_KEPT, "--dtype", "float16"), ("--dtype", "'float16'", "bfloat16", "--help")),
    "seed": ((*TO_KEPT, "--seed", "-1"), ("seed=-1", "[0, 2**63)")),
    "n": ((*TO_KEPT, "--n", "0"), ("n=0", "at least 1")),
    "top_p": ((*TO_KEPT, "--top-p", "0"), ("top_p=0", "(0, 1]")),
    "temperature": ((*TO_KEPT, "--temperature", "nan"), ("temperature=nan", "at least 0")),
    "stop": ((*TO_KEPT, "--stop", ""), ("stop", "empty text")),
    "stop token in words": ((*TO_KEPT, "--stop-token-ids", "x"), ("--stop-token-ids='x'", "whole")),
    "block size": ((*TO_KEPT, "--block-size", "0"), ("block_size=0", "at least 1")),
    "context": ((*TO_KEPT, "--max-model-len", "4096"), ("max_model_len=4096", "limit of 2048")),
    "out without rows": (
        (*TO_KEPT, "--no-routed-experts"),
        ("--out kept.routes", "drop --no-routed-experts"),
    ),
    "a shortened flag": ((*TO_KEPT, "--max-tok", "3"), ("--max-tok", "--help")),
    "a flag of another command": (
        ("verify", "good.routes", "--model", "tiny", "--reference"),
        ("--reference", "--help"),
    ),
    "verify without a model": (("verify", "good.routes"), ("--model", "--help")),
    "no command": ((), ("COMMAND", "--help")),
    "unknown command": (("explain",), ("'explain'", "demo", "generate", "inspect", "verify")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_loses_nothing(run, folder, name):
    arguments, words = MISTAKES[name]
    before = contents(folder)
    done = run(*arguments)
    assert done.status == 2
    for word in words:
        assert word in done.error
    assert done.out == ""
    assert contents(folder) == before


def test_an_interrupt_ends_quietly_and_loses_nothing(run, folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("routebook.engine.llm.LLM.generate", interrupted)
    before = contents(folder)
    done = run(*TO_KEPT)
    assert (done.status, done.out, done.err) == (130, "", "routebook: interrupted\n")
    assert contents(folder) == before


def test_a_defect_of_our_own_is_not_dressed_as_a_mistake(run, folder, monkeypatch):
    def broken(*_, **__):
        raise AssertionError("a defect")

    monkeypatch.setattr("routebook.engine.llm.LLM.generate", broken)
    before = contents(folder)
    with pytest.raises(AssertionError, match="a defect"):
        run(*TO_KEPT)
    assert contents(folder) == before
