"""The command as a process of its own: what only a process shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cli import programs

ROUTEBOOK = (sys.executable, "-m", "routebook.cli.main")
# As if torch were not installed.
BARE = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None\n" + programs.RUN,
)
LISTENING = (sys.executable, "-c", programs.LISTENING + programs.RUN)
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        env=ENV,
        timeout=120,
        **options,
    )


def test_generate_inspect_and_verify_follow_each_other(tmp_path):
    prompt = ("--prompt", "17+25=", "--max-tokens", "3", "--temperature", "0", "--dtype", "float32")
    made = run(*ROUTEBOOK, "generate", "tiny", *prompt, "--out", "x.routes", cwd=tmp_path)
    assert (made.returncode, made.stdout) == (0, "[0.0] 17+25=42\n\nwrote x.routes\n")
    seen = run(*ROUTEBOOK, "inspect", "x.routes", cwd=tmp_path)
    assert (seen.returncode, seen.stderr) == (0, "")
    assert seen.stdout.startswith("x.routes: 1 sample, 8 rows (0 absent)\n")
    checked = run(*ROUTEBOOK, "verify", "x.routes", "--model", "tiny", cwd=tmp_path)
    assert checked.returncode == 0
    assert checked.stdout == "verified: 8 rows x 6 layers, 8 equal, 0 different\n"


def test_a_hub_out_of_reach_gets_one_line(tmp_path):
    done = run(*ROUTEBOOK, "generate", "some/model", "--prompt", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("routebook: error: no model 'some/model'")


def test_a_long_prompt_gets_one_line(tmp_path):
    done = run(*ROUTEBOOK, "generate", "tiny", "--prompt", "1+1=2 " * 400, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("routebook: error: prompt 0: the prompt has 2400 tokens")


def test_an_interrupt_leaves_the_older_record(tmp_path):
    out = tmp_path / "x.routes"
    out.write_bytes(b"older")
    long = ("--n", "64", "--max-tokens", "2000", "--ignore-eos", "--out", str(out))
    with subprocess.Popen(
        [*LISTENING, "generate", "tiny", "--prompt", "It is", *long],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
    ) as process:
        seen = b""
        while b"generate:" not in seen:
            byte = process.stderr.read(1)
            assert byte, seen
            seen += byte
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == b""
    assert stderr.decode().splitlines()[-1] == "routebook: interrupted"
    assert b"Traceback" not in stderr
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.routes", b"older")]


def test_a_reader_that_goes_away_gets_no_traceback(record):
    with subprocess.Popen(
        [*ROUTEBOOK, "inspect", str(record)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_that_knows_few_characters_loses_nothing(tmp_path):
    prompt = ("--prompt", "caf\u00e9 \u2028", "--max-tokens", "1", "--out", "x.routes")
    done = subprocess.run(
        [*ROUTEBOOK, "generate", "tiny", *prompt],
        check=False,
        capture_output=True,
        env=ENV | {"PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0
    assert rb"caf\xe9 \u2028" in done.stdout
    assert (tmp_path / "x.routes").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "tiny", "--prompt", "a", "--out", "x.routes"),
        ("verify", "RECORD", "--model", "tiny"),
        ("demo", "--out", "x.routes"),
    ],
)
def test_without_torch_the_extra_is_named(record, tmp_path, command):
    arguments = [record if part == "RECORD" else part for part in command]
    done = run(*BARE, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "'torch'" in line
    assert "pip install 'routebook[engine]'" in line
    assert list(tmp_path.iterdir()) == []


def test_without_torch_a_record_can_be_inspected(record):
    done = run(*BARE, "inspect", record)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(*ROUTEBOOK, "inspect", record).stdout
