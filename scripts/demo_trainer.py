"""Start the training script as a user would, and note when it printed what.

Invariant: lines are kept in the order printed, each with the moment of its arrival; the pipe never fills up, so
watching never slows the trainer down.
"""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from demo_rented import DemoFailed

SCRIPT = Path(__file__).with_name("train_demo.py")
WAIT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Line:
    """What the trainer printed: a word such as `step` or `saving`, the step, the rest."""

    at_s: float
    word: str
    step: int
    rest: str


class TrainerProcess:
    """A running trainer and everything it has said."""

    def __init__(self, directory: Path, *, steps: int, save_every: int) -> None:
        self.errors = directory.with_name(f"{directory.name}-trainer-errors.log")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, "--dir", directory, "--steps", str(steps), "--save-every", str(save_every)],
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=directory,
            )  # fmt: skip
        self.lines: list[Line] = []
        self._has_ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            word, step, *rest = text.split()
            with self._changed:
                self.lines.append(Line(time.monotonic(), word, int(step), " ".join(rest)))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, word: str, step: int | None = None) -> Line:
        """Return the first line with *word* (and *step*), or raise DemoFailed if the trainer ends or says nothing."""

        def wanted(line: Line) -> bool:
            return line.word == word and step in (None, line.step)

        with self._changed:
            self._changed.wait_for(lambda: any(map(wanted, self.lines)) or self._has_ended, WAIT_S_MAX)
            for line in self.lines:
                if wanted(line):
                    return line
        raise DemoFailed(f"the trainer never said {word} {step or ''}:\n{self.errors.read_text()[-2000:]}")

    def has_said(self, word: str, step: int) -> bool:
        with self._changed:
            return any(line.word == word and line.step == step for line in self.lines)

    def finish(self) -> str:
        """Wait for a good end and return the digest of the final weights."""
        digest = self.wait_for("done").rest
        if self.process.wait(WAIT_S_MAX) != 0:
            raise DemoFailed(f"the trainer exited with {self.process.returncode}")
        return digest

    def kill(self) -> None:
        """End the trainer at once, if it still runs, and keep what it had said."""
        self.process.kill()
        self.process.wait(WAIT_S_MAX)
        self._reader.join(WAIT_S_MAX)
