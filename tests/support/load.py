"""A seeded write load, step by step, and the oracle that says which prefix of it a tree is.

Invariant: a step is acknowledged before the next one begins, so after a crash at most one step is in doubt; data are
random bytes of the step's own number, so a block of one moment never passes for a block of another. A step is one
request, but for about one write in a hundred, which the kernel sends as two (measured: 35 of 3,000 writes of 100 kB).
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import BinaryIO

MIB = 1 << 20
PIECE_MAX = 100_000
FILE_MAX = 2 * MIB + 200_000

Tree = dict[str, bytes | None]
"""Path → content, None for a directory."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call; the number makes its data, of which only the first *sent* bytes may have gone."""

    number: int
    kind: str
    path: str
    offset: int = 0
    length: int = 0
    target: str = ""
    sent: int | None = None

    @property
    def writes(self) -> bool:
        return self.kind in ("append", "write")

    @property
    def data(self) -> bytes:
        return random.Random(self.number).randbytes(self.length)[: self.sent]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first *count* steps, and so many bytes of the write after them."""

    count: int
    sent: int = 0


class Model:
    """What the steps so far have made."""

    def __init__(self) -> None:
        self.tree: dict[str, bytearray | None] = {}

    def apply(self, step: Step) -> set[str]:
        """Carry *step* out; returns the paths that may have changed."""
        tree, path = self.tree, step.path
        if step.kind in ("create", "mkdir"):
            tree[path] = bytearray() if step.kind == "create" else None
        elif step.kind == "unlink":
            del tree[path]
        elif step.kind == "rename":
            tree[step.target] = tree.pop(path)
            return {path, step.target}
        else:
            self._change(step)
        return {path}

    def _change(self, step: Step) -> None:
        data = self.tree[step.path]
        assert data is not None
        if step.kind == "append":
            data += step.data
        elif step.kind == "truncate":
            del data[step.length :]
            data.extend(bytes(step.length - len(data)))
        else:
            written = step.data
            data.extend(bytes(max(0, step.offset - len(data))))
            data[step.offset : step.offset + len(written)] = written


def steps(seed: int, model: Model, first: int = 0) -> Iterator[Step]:
    """Draw steps that fit what *model* is by then; the caller applies each before it asks for the next."""
    rng = random.Random(seed)
    for number in range(first, 1 << 40):
        files = sorted(path for path, data in model.tree.items() if data is not None)
        directories = sorted(path for path, data in model.tree.items() if data is None)
        yield _draw(rng, number, files, directories, model)


def _draw(rng: random.Random, number: int, files: list[str], directories: list[str], model: Model) -> Step:
    dice = rng.random()
    parent = rng.choice(["", *(f"{path}/" for path in directories)])
    fresh = f"{parent}f{number}"
    if len(files) < 3 or (dice < 0.05 and len(files) < 14):
        return Step(number, "create", fresh)
    if dice < 0.08 and len(directories) < 4:
        return Step(number, "mkdir", f"d{number}")
    path = rng.choice(files)
    size = len(model.tree[path] or b"")
    length = rng.choice((80, 80, 4096, 30_000, PIECE_MAX))
    if dice < 0.14:
        return Step(number, "rename", path, target=rng.choice([fresh, *(other for other in files if other != path)]))
    if dice < 0.19:
        return Step(number, "unlink", path)
    if dice < 0.25:
        return Step(number, "truncate", path, length=rng.choice((0, size // 2, size + 70_000, MIB)))
    if dice < 0.6 and size < FILE_MAX:
        return Step(number, "append", path, length=length)
    return Step(number, "write", path, offset=rng.randrange(0, max(1, min(size + 50_000, FILE_MAX))), length=length)


def perform(root: Path, step: Step) -> None:
    """Make the call; opening and closing a file that exists changes nothing."""
    path = root / step.path
    if step.kind == "mkdir":
        os.mkdir(path)
    elif step.kind == "unlink":
        os.unlink(path)
    elif step.kind == "rename":
        os.rename(path, root / step.target)
    elif step.kind == "truncate":
        os.truncate(path, step.length)
    elif step.kind == "create":
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    else:
        fd = os.open(path, os.O_WRONLY | (os.O_APPEND if step.kind == "append" else 0))
        try:
            done = os.write(fd, step.data) if step.kind == "append" else os.pwrite(fd, step.data, step.offset)
            if done < step.length:
                raise Interrupted(errno.EIO, f"only {done} bytes of {step} were taken")
        finally:
            # A daemon that died between the write and the close has acknowledged the write.
            with suppress(OSError):
                os.close(fd)


class Interrupted(OSError):
    """A write was cut short between its requests, by the death of the daemon."""


@dataclass
class Load:
    """Steps on a mount, made by a process of its own until told to stop or until one fails.

    A process, since a test that starts another one would have it close inherited files of a mount that hangs.
    """

    root: Path
    seed: int
    model: Model = field(default_factory=Model)
    done: list[tuple[Step, float]] = field(default_factory=list)
    """Acknowledged steps and when."""
    in_doubt: Step | None = None
    error: OSError | None = None
    pause_s: float = 0.0
    _process: BaseProcess | None = None
    _stop: Event | None = None
    _records: BinaryIO | None = None

    def start(self) -> Load:
        self.in_doubt = self.error = None
        context = multiprocessing.get_context("fork")
        self._stop, self._records = context.Event(), tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._process = context.Process(target=self._run, daemon=True)
        self._process.start()
        return self

    def _run(self) -> None:
        assert self._stop is not None
        assert self._records is not None
        first = len(self.done)
        for step in steps(self.seed * 1000 + first, self.model, first):
            if self._stop.wait(self.pause_s):
                return
            failure = None
            try:
                perform(self.root, step)
            except OSError as error:
                failure = error.errno
            self._records.write(pickle.dumps((step, time.monotonic(), failure)))
            if failure is not None:
                return
            self.model.apply(step)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def stop(self) -> Load:
        """End the load after the step in hand, and take over what it has done."""
        assert self._process is not None
        assert self._stop is not None
        assert self._records is not None
        self._stop.set()
        self._process.join(60)
        assert not self._process.is_alive(), "a request hangs"
        assert self._process.exitcode == 0, "the load itself failed"
        self._records.seek(0)
        with self._records as records, suppress(EOFError):
            while True:
                step, at, failure = pickle.load(records)
                if failure is not None:
                    self.in_doubt, self.error = step, OSError(failure, os.strerror(failure))
                    continue
                self.model.apply(step)
                self.done.append((step, at))
        return self

    def settle(self, found: Prefix) -> None:
        """Decide the step in doubt, after looking."""
        step, self.in_doubt = self.in_doubt, None
        if step is not None and found != Prefix(len(self.done)):
            if found.sent:
                step = replace(step, sent=found.sent)
            self.model.apply(step)
            self.done.append((step, time.monotonic()))

    def go_back_to(self, found: Prefix) -> None:
        """Forget what came after *found*: a fresh node goes on from there."""
        made = self.steps()[: found.count + bool(found.sent)]
        if found.sent:
            made[-1] = replace(made[-1], sent=found.sent)
        self.model, self.in_doubt = Model(), None
        self.done = [(step, time.monotonic()) for step in made]
        for step in made:
            self.model.apply(step)

    def prefixes(self, seen: Tree) -> list[Prefix]:
        """Which beginnings of what was done (or is in doubt) make exactly *seen*."""
        model, found = Model(), [] if seen else [Prefix(0)]
        differing = set(seen)
        for count, step in enumerate(self.steps()):
            if step.writes and differing <= {step.path} and (sent := _partly(model, step, seen)):
                found.append(Prefix(count, sent))
            for path in model.apply(step):
                here, there = path in model.tree, path in seen
                same = here == there and (not here or model.tree[path] == seen[path])
                differing = differing - {path} if same else differing | {path}
            if not differing:
                found.append(Prefix(count + 1))
        return found

    def steps(self) -> list[Step]:
        """Everything that may have happened, in order."""
        return [step for step, _ in self.done] + ([self.in_doubt] if self.in_doubt is not None else [])


def _partly(model: Model, step: Step, seen: Tree) -> int:
    """How many bytes of the write *step* would make its file what it is in *seen*; 0 for none or all."""
    have, before = seen.get(step.path), model.tree.get(step.path)
    if have is None or before is None:
        return 0
    start = len(before) if step.kind == "append" else step.offset
    data = step.data
    sent = next((at for at, byte in enumerate(data) if have[start + at : start + at + 1] != bytes([byte])), len(data))
    if not 0 < sent < len(data):
        return 0
    rest = Model()
    rest.tree[step.path] = bytearray(before)
    rest.apply(replace(step, sent=sent))
    return sent if rest.tree[step.path] == have else 0


def tree_of(root: Path) -> Tree:
    """Read everything below *root*."""
    found: Tree = {}
    for directory, names, files in os.walk(root, onerror=_fail):
        here = Path(directory)
        found |= {str((here / name).relative_to(root)): None for name in names}
        found |= {str((here / name).relative_to(root)): (here / name).read_bytes() for name in files}
    return found


def _fail(error: OSError) -> None:
    raise error


def nearest(load: Load, seen: Tree) -> str:
    """Say how far *seen* is from every prefix: for the message of a failed test."""
    model, best = Model(), (1 << 30, -1, "")
    steps_made = load.steps()
    for count, step in enumerate(steps_made, 1):
        model.apply(step)
        wrong = [p for p in model.tree.keys() | seen.keys() if model.tree.get(p, 0) != seen.get(p, 0)]
        if len(wrong) < best[0]:
            best = len(wrong), count, ", ".join(_difference(p, model.tree.get(p), seen.get(p)) for p in wrong[:4])
    return f"of {len(steps_made)} steps, closest is {best[1]} with {best[0]} paths wrong: {best[2]}"


def _difference(path: str, want: bytes | bytearray | None, have: bytes | None) -> str:
    if want is None or have is None:
        return f"{path} ({'missing' if have is None else 'too much'})"
    at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
    return f"{path} (from byte {at}; {len(want)} bytes expected, {len(have)} seen)"
