"""Interrupts and requests to end, at any time: one line, the right status, and no file or process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.programs import LISTENING, RUN

# Sends itself a signal when a module is about to be imported.
SIGNAL_AT_IMPORT = """
import os
class Signaller:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Signaller())
"""
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LONG = ("--n", "64", "--max-tokens", "2000", "--ignore-eos", "--out", "x.routes")
STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
WORDS = {
    "SIGINT": "routebook: interrupted",
    "SIGTERM": "routebook: ended by SIGTERM",
    "SIGHUP": "routebook: ended by SIGHUP",
}


@contextmanager
def generating(folder: Path, prelude: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A long generation, in a session of its own, over a record that was there before."""
    (folder / "x.routes").write_bytes(b"older")
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            LISTENING + prelude + RUN,
            "generate",
            "tiny",
            "--prompt",
            "It is",
            *LONG,
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
        cwd=folder,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def read_until(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stderr is not None
    seen = b""
    while words not in seen:
        byte = process.stderr.read(1)
        assert byte, seen
        seen += byte


def check_end(process: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    stdout, stderr = process.communicate(timeout=60)
    assert b"Traceback" not in stderr, stderr.decode()
    assert stderr.decode().splitlines()[-1] == WORDS[name]
    assert (process.returncode, stdout) == (STATUS[name], b"")
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [("x.routes", b"older")]


def workers_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.mark.parametrize("module", ["routebook.cli.parser", "numpy", "msgspec", "torch"])
def test_an_interrupt_while_modules_are_loaded(tmp_path: Path, module: str) -> None:
    prelude = SIGNAL_AT_IMPORT.format(module=module, signal="SIGINT")
    with generating(tmp_path, prelude) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"routebook: interrupted\n")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.routes", b"older")]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_request_to_end_leaves_the_older_record(tmp_path: Path, name: str) -> None:
    with generating(tmp_path, "") as process:
        read_until(process, b"generate:")
        process.send_signal(signal.Signals[name])
        check_end(process, tmp_path, name)


def test_a_hangup_that_was_to_be_ignored_is_ignored(tmp_path: Path) -> None:
    """As `nohup` starts a program."""
    with generating(tmp_path, "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n") as process:
        read_until(process, b"generate:")
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored >> (signal.SIGHUP - 1) & 1
        process.send_signal(signal.SIGTERM)
        check_end(process, tmp_path, "SIGTERM")


def wait_for_worker(process: subprocess.Popen[bytes]) -> int:
    """Its process id, as soon as it is loading torch."""
    while True:
        for pid in workers_of(process.pid):
            folder = Path(f"/proc/{pid}")
            # Before it is another program it is a copy of its parent.
            is_worker = b"worker_process" in (folder / "cmdline").read_bytes()
            if is_worker and "libtorch" in (folder / "maps").read_text():
                return pid
        assert process.poll() is None


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["started", "loading", "serving"])
def test_a_worker_s_process_ends_as_quietly(tmp_path: Path, name: str, moment: str) -> None:
    """The signal goes to all processes of the session, as from a terminal, and the worker is not one of them."""
    with generating(tmp_path, "", "--executor", "process") as process:
        while not (workers := workers_of(process.pid)):
            assert process.poll() is None
        if moment != "started":
            worker = wait_for_worker(process)
            assert os.getsid(worker) == worker
        if moment == "serving":
            read_until(process, b"generate:")
        os.killpg(process.pid, signal.Signals[name])
        check_end(process, tmp_path, name)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
