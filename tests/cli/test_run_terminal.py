"""Is the terminal the command's, and does job control work as with any program?"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.daemon import WORKSPACE, Node
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, stored
from tests.support.running import runs as runs

pytestmark = needs_fuse

SAID_WITHIN_S = 60.0
TALKS = """
import os, sys
print("mine", os.tcgetpgrp(0) == os.getpgrp(), flush=True)
try:
    for line in sys.stdin:
        open(os.environ["SPOTWARP_WORKSPACE"] + "/f", "w").write(line)
        print("GOT", line, flush=True)
except KeyboardInterrupt:
    sys.exit(44)
"""


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            argv, env=environment, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inner)
        self._unread = ""
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until the program has shown *text*, and forget everything up to there."""
        end_s = time.monotonic() + SAID_WITHIN_S
        while text not in self._unread:
            assert time.monotonic() < end_s, f"{text!r} was not shown:\n{self.seen}"
            if select.select([self._fd], [], [], 0.1)[0]:
                with suppress(OSError):  # EIO: the other end is closed
                    chunk = os.read(self._fd, 4096).decode(errors="replace")
                    self._unread, self.seen = self._unread + chunk, self.seen + chunk
        self._unread = self._unread.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SAID_WITHIN_S)
        os.close(self._fd)


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[Node, list[str]], Screen]:
    def start(node: Node, argv: list[str]) -> Screen:
        screen = Screen(argv, {**node._environment(), "PS1": "$ ", "TERM": "dumb", "HISTFILE": ""})
        request.addfinalizer(screen.close)
        return screen

    return start


def command_line(node: Node, directory: Path) -> list[str]:
    program = directory / "talks.py"
    program.write_text(TALKS)
    where = ["--workspace", str(node.root), "--store", node.store, "--name", WORKSPACE, "--cache-dir", str(node.cache)]
    return node.command("run", *where, "--", sys.executable, str(program))


def test_ctrl_c_is_the_commands_and_run_goes_on_to_publish(
    runs: Runs, show: Callable[[Node, list[str]], Screen], tmp_path: Path
) -> None:
    node = runs.node()
    screen = show(node, command_line(node, tmp_path))
    screen.until("mine True")
    screen.type("hello\n")
    screen.until("GOT hello")
    screen.type("\x03")
    screen.until("saved at manifest")
    assert screen.process.wait(SAID_WITHIN_S) == 44
    assert stored(node, "f") == "hello\n"


def test_a_shell_can_stop_it_and_go_on_with_it(
    runs: Runs, show: Callable[[Node, list[str]], Screen], tmp_path: Path
) -> None:
    node = runs.node()
    script = tmp_path / "go.sh"
    words = " ".join("'" + word + "'" for word in command_line(node, tmp_path))
    script.write_text(f"exec {words}\n")
    shell = show(node, ["bash", "--norc", "-i"])
    shell.type(f"bash {script}\n")
    shell.until("mine True")
    shell.type("\x1a")
    shell.until("Stopped")
    shell.type("echo $((20+2)) here\n")
    shell.until("22 here")
    shell.type("fg\n")
    shell.until("go.sh")
    shell.type("one\n")
    shell.until("GOT one")
    shell.type("\x1a")
    shell.until("Stopped")
    shell.type("bg\n")
    shell.until("go.sh &")
    # It reads the terminal in the background, which stops it, and the shell must learn of that.
    shell.type('while [ -n "$(jobs -r)" ]; do sleep 0.1; done; jobs\n')
    shell.until("Stopped")
    shell.type("fg\n")
    shell.until("go.sh")
    shell.type("two\n")
    shell.until("GOT two")
    shell.type("\x04")
    shell.until("saved at manifest")
    assert stored(node, "f") == "two\n"
