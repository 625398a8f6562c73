"""Nodes of the local provider, seen from outside: their processes, their disk, what the trainer on them prints.

Invariant: after `lose` nothing of the node is left that a lost machine would not leave: no process, no mount, no disk.
The provider keeps its record, as a real one does.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import trio

from provisioner.providers.disks import delete_tree
from provisioner.providers.processes import kill_all, unmount_under

LOOK_EVERY_S = 0.002
WAIT_S_MAX = 60.0
WORDS = frozenset({"resumed", "step", "saving", "saved", "done"})


class DemoFailed(Exception):
    """Something that the product promises did not happen; the message says what."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the trainer printed: a word such as `step` or `saving`, the step, the rest; when it was seen."""

    at_s: float
    word: str
    step: int
    rest: str


class RentedNode:
    """One node, from the moment that it runs the trainer."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.workspace = home / "disk" / "workspace"
        self.lines: list[Line] = []
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _follow(self) -> None:
        part = ""
        with (self.home / "node.log").open(errors="replace") as log:
            while not self._stopped.is_set():
                found = log.readline()
                if not found:
                    time.sleep(LOOK_EVERY_S)
                    continue
                part += found
                if part.endswith("\n"):
                    self._take(part)
                    part = ""

    def _take(self, text: str) -> None:
        word, *rest = text.split() or [""]
        if word not in WORDS or not rest or not rest[0].isdigit():
            return  # the agent's own words
        with self._changed:
            self.lines.append(Line(time.time(), word, int(rest[0]), " ".join(rest[1:])))
            self._changed.notify_all()

    def wait_for(self, word: str, step: int | None = None) -> Line:
        """Return the first line with *word* (and *step*), or raise DemoFailed."""

        def found() -> Line | None:
            return next((line for line in self.lines if line.word == word and step in (None, line.step)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None, WAIT_S_MAX)
            line = found()
        if line is None:
            told = (self.home / "node.log").read_text(errors="replace")[-3000:] if self.home.exists() else "gone"
            raise DemoFailed(f"the trainer never said {word} {step or ''}:\n{told}")
        return line

    def has_said(self, word: str, step: int) -> bool:
        """Tell whether a line was seen."""
        with self._changed:
            return any(line.word == word and line.step == step for line in self.lines)

    def lose(self) -> float:
        """Kill every process with SIGKILL and delete the disk; return when it began."""
        began_s = time.time()

        async def end() -> bool:
            return await kill_all(str(self.home)) and await unmount_under(self.home)

        if not trio.run(end):
            raise DemoFailed(f"processes or mounts of {self.home} survive")
        time.sleep(0.05)  # what was printed before the end is in the log now
        self.stop()
        delete_tree(self.home / "disk")
        return began_s

    def stop(self) -> None:
        """Follow the log no longer."""
        self._stopped.set()
        self._follower.join(WAIT_S_MAX)


def node_of(nodes: Path, ident: str) -> RentedNode:
    """Find the directory of the node that was rented for the intent *ident*."""
    for record in nodes.glob("*/*/record.json"):
        if f'-{ident}"' in record.read_text():
            return RentedNode(record.parent)
    raise DemoFailed(f"no node below {nodes} was rented for {ident}")
