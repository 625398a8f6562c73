"""A job on a terminal: it shows the plan and asks, draws what happens, and Ctrl-C asks before anything ends."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

PATIENCE_S = 90.0
CTRL_C = b"\x03"


@dataclass
class Terminal:
    """A process with a terminal of its own."""

    pid: int
    descriptor: int
    shown: bytes = b""

    def until(self, *words: bytes) -> None:
        """Wait until each of *words* was shown, and forget what was shown before."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(word in self.shown for word in words):
            assert time.monotonic() < deadline, f"no {words} in\n{self.shown[-4000:].decode(errors='replace')}"
            if select.select([self.descriptor], [], [], 0.2)[0]:
                self.shown += os.read(self.descriptor, 1 << 16)
        self.shown = b""

    def types(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def code(self) -> int:
        """Wait for the end."""
        with open(self.descriptor, "rb", buffering=0, closefd=False) as output:
            try:
                while part := output.read(1 << 16):
                    self.shown += part
            except OSError:
                pass  # the other side of the terminal was closed
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
    made = CommandLine(tmp_path, f"file://{tmp_path / 'store'}", path)
    yield made
    made.run("down", "run7")


def started(cli: CommandLine, command: str) -> Terminal:
    words = [
        sys.executable, "-m", "spotwarp_fs", "failover", "--providers", "local-a,local-b", "--workspace", "run7",
        "--job", "run7", "--interval", "1s", "--mode", "directory", "--", "sh", "-c", command,
    ]  # fmt: skip
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(cli.home)
        os.execvpe(words[0], words, cli.whole_environment)
    return Terminal(pid, descriptor)


@pytest.mark.timeout(240)
def test_ctrl_c_asks_and_does_what_it_is_told(cli: CommandLine) -> None:
    terminal = started(cli, "while sleep 1; do date > out; done")
    terminal.until(b"verdict:", b"Rent nodes for run7? [y/N]")
    terminal.types(b"y\n")
    terminal.until(b"launch 1: local-", b"winner", b"healthy")
    terminal.types(CTRL_C)
    terminal.until(b"[t]ear everything down")
    terminal.types(b"c\n")
    terminal.until(b"winner")
    terminal.types(CTRL_C)
    terminal.until(b"[t]ear everything down")
    terminal.types(b"t\n")
    assert terminal.code() == 143
    assert b"run7 ended with exit code 143" in terminal.shown
    assert not list((cli.home / ".spotwarp" / "nodes").glob("*/*/record.json")), "every node is gone"


def test_whoever_does_not_say_yes_rents_nothing(cli: CommandLine) -> None:
    terminal = started(cli, "true")
    terminal.until(b"Rent nodes for run7? [y/N]")
    terminal.types(b"\n")
    assert terminal.code() == 1
    assert b"nothing was rented" in terminal.shown
    assert not (cli.home / ".spotwarp" / "nodes").exists()
