"""`spotwarp failover` as a user starts it, and everything that it says while it works.

Invariant: events are kept in their order; reading never stops, so watching never slows the controller down.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo_rented import DemoFailed

SPOTWARP = str(Path(sys.executable).with_name("spotwarp"))
WAIT_S_MAX = 90.0
COMMAND_S_MAX = 60.0

Event = dict[str, Any]


def environment_of(home: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What the user's shell has: nothing of this process but where programs are."""
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LANG", "TERM", "TMPDIR") if key in os.environ}
    return {**kept, "HOME": str(home), "SPOTWARP_STATE_DIR": str(home / "state"), **given}


def spotwarp(home: Path, given: Mapping[str, str], *arguments: str) -> str:
    """Run one command and return what it printed, or raise DemoFailed with its own words."""
    run = subprocess.run(
        [SPOTWARP, *arguments], env=environment_of(home, given), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=COMMAND_S_MAX, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise DemoFailed(f"spotwarp {arguments[0]} exited with {run.returncode}:\n{run.stdout}{run.stderr}")
    return run.stdout


class Job:
    """A running controller."""

    def __init__(
        self, home: Path, given: Mapping[str, str], arguments: list[str], seen: Callable[[Event], None]
    ) -> None:
        self.errors = home / "failover.log"
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [SPOTWARP, "failover", "--yes", "--events", *arguments], env=environment_of(home, given), cwd=home,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.events: list[Event] = []
        self._seen = seen
        self._has_ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if "event" not in event:
                continue
            self._seen(event)
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def failover(self, number: int) -> Event:
        """Wait for the end of failover *number*, launches included, and return its record."""

        def found() -> Event | None:
            of_kind = (event["failover"] for event in self.events if event["event"] == "FailoverEnded")
            return next((each for each in of_kind if each["number"] == number), None)

        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or found() is not None, WAIT_S_MAX)
            record = found()
        if record is None:
            raise DemoFailed(f"failover {number} never ended:\n{self.story()}")
        return record

    def finish(self) -> None:
        """Wait for a good end."""
        try:
            code = self.process.wait(WAIT_S_MAX)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the controller does not end:\n{self.story()}") from None
        self._reader.join(WAIT_S_MAX)
        if code != 0:
            raise DemoFailed(f"spotwarp failover exited with {code}:\n{self.story()}")

    def story(self) -> str:
        """The end of what it said."""
        return self.errors.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(COMMAND_S_MAX)
        self._reader.join(COMMAND_S_MAX)
