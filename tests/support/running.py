"""Start `spotwarp run` as a user does, watch what it says, and leave nothing of it behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotwarp_fs.local.processes import descendants
from tests.support.daemon import WORKSPACE, Fleet, Node, _end_with_tests, await_true

ENDED_WITHIN_S = 90.0
LAST_LIFE_S = 900.0
"""The last of many lives may have most of the work left, on a machine that is busy with others."""


@dataclass
class Run:
    """One `spotwarp run`, going on or ended."""

    node: Node
    process: subprocess.Popen[bytes]
    said_path: Path
    output_path: Path

    @property
    def said(self) -> str:
        """Standard error: the command's and our own."""
        return self.said_path.read_text(errors="replace")

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def until(self, text: str) -> Run:
        """Wait until the command or `run` has printed *text*."""
        await_true(lambda: text in self.output + self.said or self.process.poll() is not None, f"{text!r} to be said")
        assert text in self.output + self.said, self.story()
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def lose(self) -> None:
        """The machine is gone: `run`, its command, supervisor and daemon die at the same moment."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(ENDED_WITHIN_S)

    def ended(self, within_s: float = ENDED_WITHIN_S) -> int:
        """Wait for the end; gives the exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.story()}") from None

    def story(self) -> str:
        return f"exit code {self.process.poll()}\n{self.output}\n{self.said}\n{self.node.log()[-3000:]}"


@dataclass
class Runs:
    """Makes runs on nodes of one store."""

    fleet: Fleet
    made: list[Run] = field(default_factory=list)

    def node(self) -> Node:
        return self.fleet.node()

    def start(
        self,
        node: Node,
        *command: str,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        wrapper: tuple[str, ...] = (),
        first: str = "",
    ) -> Run:
        """Start it on *node* in a session of its own; *command* follows `--`. *first* is run before, to set limits."""
        where = ["--workspace", str(node.root), "--store", node.store, "--name", WORKSPACE]
        arguments = ["run", *where, "--cache-dir", str(node.cache), "--interval", "1s", *flags]
        said, output = (node.home / f"{kind}{len(self.made)}" for kind in ("said", "output"))
        python, dash_c, text, *rest = node.command(*arguments, *(["--", *command] if command else []))
        with said.open("wb") as errors, output.open("wb") as written:
            process = subprocess.Popen(
                [*wrapper, python, dash_c, f"{first}\n{text}", *rest],
                env={**node._environment(), **(environment or {})}, cwd=cwd or node.home, stdin=subprocess.DEVNULL,
                stdout=written, stderr=errors, start_new_session=True, preexec_fn=_end_with_tests,
            )  # fmt: skip
        run = Run(node, process, said, output)
        self.made.append(run)
        return run

    def python(self, node: Node, program: str, **options: object) -> Run:
        """Run a Python program given as text."""
        script = node.home / f"program{len(self.made)}.py"
        script.write_text(program)
        return self.start(node, sys.executable, "-u", str(script), **options)  # type: ignore[arg-type]

    def close(self) -> None:
        for run in self.made:
            if run.process.poll() is None:
                run.lose()
        self.fleet.close()


def lose_often(
    runs: Runs, line: Callable[[Node], Sequence[str]], *, flags: tuple[str, ...], lives: int, rng: random.Random
) -> Run:
    """Run *line* on a fresh node each time and lose the node at a random time, *lives* times; gives the last run.

    That one has ended well. A node is not lost before the command's first step, or nothing would ever be done.
    """
    for _ in range(lives):
        node = runs.node()
        run = runs.start(node, *line(node), flags=("--takeover", *flags)).until("step ")
        time.sleep(rng.random() * 3)
        if run.process.poll() is not None:
            break
        run.lose()
        node.lose()
    else:
        node = runs.node()
        run = runs.start(node, *line(node), flags=("--takeover", *flags))
    assert run.ended(LAST_LIFE_S) == 0, run.story()
    return run


def stored(node: Node, path: str) -> str:
    """Read a file straight from the store, as any machine could."""
    done = node.run("cat", "--store", node.store, f"{WORKSPACE}:{path}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def nothing_left(run: Run) -> None:
    """Neither a mount nor a process of the workspace."""
    node = run.node
    assert not node.root.is_mount(), run.story()
    assert not list((node.state / "mounts").glob("*.json")), run.story()
    (node.root / "writable").touch()
    (node.root / "writable").unlink()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Runs over a directory store."""
    made = Runs(Fleet(tmp_path, f"file://{tmp_path / 'store'}"))
    try:
        yield made
    finally:
        made.close()
