"""The `spotwarp run` below the agent: its arguments, its life, the end of what it prints, and the notes it leaves.

Invariant: it gets SIGTERM when the agent dies, so that nothing goes on unwatched; and what it prints is passed on as it
comes, while at most LOG_BYTES of it are kept.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

from provisioner.core.jobs import JobSpec
from provisioner.node.deciding import Noted
from provisioner.node.errand import Errand
from spotwarp_fs import api

LOG_BYTES: Final = 256 << 10
CHUNK_BYTES: Final = 64 << 10
WORDS_CHARS_MAX: Final = 500
NOTES: Final = ("prefetched", "claimed", "first_read", "started")
ENDED: Final = "ended"
MASK: Final = b"[secret]"
PR_SET_PDEATHSIG: Final = 1
USUAL_UMASK: Final = 0o022


def run_arguments(errand: Errand, spec: JobSpec, place: Path, *, publish_only: bool = False) -> list[str]:
    """Return the command line; nothing in it is secret."""
    nothing = (sys.executable, "-c", "pass")
    return [
        sys.executable, "-m", "spotwarp_fs", "run",
        "--workspace", str(place), "--name", spec.workspace, "--checkpoint-path", spec.checkpoint_path,
        "--interval", spec.interval, "--mode", spec.form, "--permit", str(errand.permit),
        "--node-intent", errand.ident, "--node-instance", errand.instance_id,
        "--", *(nothing if publish_only else spec.command),
    ]  # fmt: skip


def read_note(permit: Path, name: str) -> dict[str, Any] | None:
    """Read one of the notes beside the permit; None while it is not there."""
    try:
        found: dict[str, Any] = json.loads(permit.with_name(f"{permit.name}.{name}").read_text())
    except (OSError, ValueError):
        return None
    return found


def event_of(name: str, note: dict[str, Any]) -> Noted:
    """Turn a note into what the agent decides by."""
    return Noted(
        name,
        float(note["at_s"]),
        writer_epoch=note.get("writer_epoch"),
        resumed_from=note.get("resumed_from"),
        form=str(note.get("form", "")),
    )


class Tail:
    """The end of an output, without secrets."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = [secret.encode() for secret in sorted(secrets, key=len, reverse=True)]
        self._kept = bytearray()
        self.version = 0
        """Rises with everything added."""

    def add(self, chunk: bytes) -> None:
        """Append, and forget the beginning."""
        self._kept += chunk
        del self._kept[: max(0, len(self._kept) - 2 * LOG_BYTES)]
        self.version += 1

    def text(self) -> bytes:
        """Return at most LOG_BYTES, from a line's beginning where something was left out."""
        found = bytes(self._kept)
        for secret in self._secrets:
            found = found.replace(secret, MASK)
        if len(found) <= LOG_BYTES:
            return found
        found = found[-LOG_BYTES:]
        return found[found.find(b"\n") + 1 :]

    def last_words(self) -> str:
        """Return the last line that says `error`, or the last one at all."""
        lines = [line.strip() for line in self.text().decode(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if "error" in line.lower()]
        return (said or lines or [""])[-1][-WORDS_CHARS_MAX:]


class RunProcess:
    """One `spotwarp run`."""

    def __init__(self, errand: Errand, arguments: Sequence[str], tail: Tail) -> None:
        for name in (*NOTES, ENDED):
            errand.permit.with_name(f"{errand.permit.name}.{name}").unlink(missing_ok=True)
        self._permit = errand.permit
        self._tail = tail
        self._process = subprocess.Popen(
            list(arguments), env=dict(errand.run_environment), cwd=errand.home, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_end_with_agent(),
        )  # fmt: skip

    async def ended(self, pass_on: Callable[[bytes], None]) -> int:
        """Read what it prints until it has ended; gives the exit code, a signal's as a shell says it."""
        assert self._process.stdout is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, pass_on, nursery.cancel_scope)
            code = await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
            # What it started may keep the pipe open; what was printed until now comes still.
            nursery.cancel_scope.deadline = trio.current_time() + 1.0
        return 128 - code if code < 0 else code

    async def _listen(self, pass_on: Callable[[bytes], None], scope: trio.CancelScope) -> None:
        assert self._process.stdout is not None
        async with trio.lowlevel.FdStream(os.dup(self._process.stdout.fileno())) as stream:
            with suppress(trio.BrokenResourceError):
                while chunk := await stream.receive_some(CHUNK_BYTES):
                    self._tail.add(bytes(chunk))
                    pass_on(bytes(chunk))

    def saved(self) -> bool:
        """Say whether it said that everything is published."""
        return bool((read_note(self._permit, ENDED) or {}).get("saved"))

    def stop(self, *, kill: bool) -> None:
        """Ask for its end; or kill all of it: a daemon that is started again publishes what this one has."""
        if not kill:
            self._process.send_signal(signal.SIGTERM)
            return
        for pid in [self._process.pid, *api.descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the pipe."""
        if self._process.stdout is not None:
            self._process.stdout.close()


def _end_with_agent() -> Callable[[], None]:
    """Make what a child runs before its program; the library is loaded here, for a fork may not."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # The start script's own files are nobody else's business; the command's are made as it is used to.
        os.umask(USUAL_UMASK)

    return ask
