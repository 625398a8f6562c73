"""A tiny filesystem in memory behind the real FUSE skin, and the means to mount it in a process of its own.

Invariant: it is only as right as the skin's tests need; what it was told is appended to `events.jsonl` in its cache
directory, one JSON object per line, so that a test sees what reached the engine's side.

    python mounts.py MOUNTPOINT CACHE [--options JSON] [--ready-fd N]
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from spotwarp_fs.core.errors import Corrupt, ExitCode, Fenced, Refused, SpotwarpError, Unavailable
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.requests import Actor, AttributeChange, DirectoryItem, FilesystemFigures, Handle, Node
from spotwarp_fs.core.types import ROOT_INODE, Inode

CAN_MOUNT = os.path.exists("/dev/fuse") and os.access("/dev/fuse", os.R_OK | os.W_OK)
needs_fuse = [pytest.mark.fuse, pytest.mark.skipif(not CAN_MOUNT, reason="/dev/fuse is missing or closed to us")]
START_DEADLINE_S = 20.0

TROUBLE: dict[bytes, Exception] = {
    b"trouble-refused": Refused(errno.ENOTEMPTY),
    b"trouble-fenced": Fenced("taken over"),
    b"trouble-corrupt": Corrupt("frame does not match"),
    b"trouble-unavailable": Unavailable("no answer"),
    b"trouble-os": OSError(errno.ENOSPC, "full"),
    b"trouble-bug": ZeroDivisionError("a bug"),
    b"trouble-group": ExceptionGroup("nursery", [Refused(errno.EDQUOT)]),
}
"""Names whose lookup raises."""


class Tiny:
    """Dicts: records, file contents, directories and xattrs; handles are numbers that lead to inodes."""

    def __init__(self, events: Path) -> None:
        now = time.time_ns()
        root = InodeRecord(
            stat.S_IFDIR | 0o755, 2, os.getuid(), os.getgid(), 0, atime_ns=now, mtime_ns=now, ctime_ns=now
        )
        self.records = {ROOT_INODE: root}
        self.content: dict[Inode, bytearray] = {}
        self.names: dict[Inode, dict[bytes, tuple[int, Inode]]] = {ROOT_INODE: {}}
        self.xattrs: dict[Inode, dict[bytes, bytes]] = {}
        self.handles: dict[Handle, Inode] = {}
        self.known: dict[Inode, int] = {}
        self.serial = 1
        self.events = events

    def event(self, **what: Any) -> None:
        with open(self.events, "a") as file:
            print(json.dumps(what), file=file)

    def number(self) -> int:
        self.serial += 1
        return self.serial

    def node(self, ino: Inode) -> Node:
        return Node(ino, self.records[ino])

    def add(self, parent: Inode, name: bytes, record: InodeRecord) -> Node:
        if name in self.names[parent]:
            raise Refused(errno.EEXIST)
        now = time.time_ns()
        ino = Inode(self.number())
        self.records[ino] = replace(record, atime_ns=now, mtime_ns=now, ctime_ns=now)
        self.names[parent][name] = (self.number(), ino)
        if stat.S_ISDIR(record.mode):
            self.names[ino] = {}
        elif stat.S_ISREG(record.mode):
            self.content[ino] = bytearray()
        return self.node(ino)

    def opened(self, ino: Inode) -> Handle:
        handle = Handle(self.number())
        self.handles[handle] = ino
        return handle

    def resize(self, ino: Inode, size: int) -> None:
        content = self.content[ino]
        del content[size:]
        content.extend(bytes(size - len(content)))
        self.records[ino] = replace(self.records[ino], size=size, allocated=size, mtime_ns=time.time_ns())

    async def lookup(self, parent: Inode, name: bytes) -> Node:
        self.event(request="lookup", name=os.fsdecode(name))
        if name in TROUBLE:
            raise TROUBLE[name]
        found = self.names[parent].get(name)
        if found is None:
            raise Refused(errno.ENOENT)
        return self.node(found[1])

    async def getattr(self, ino: Inode) -> Node:
        return self.node(ino)

    async def setattr(self, ino: Inode, change: AttributeChange, handle: Handle | None, actor: Actor) -> Node:
        if change.size is not None:
            self.resize(ino, change.size)
        record = self.records[ino]
        wanted: dict[str, Any] = {
            key: value for key in ("uid", "gid", "atime_ns", "mtime_ns") if (value := getattr(change, key)) is not None
        }
        if change.mode is not None:
            wanted["mode"] = stat.S_IFMT(record.mode) | change.mode
        self.records[ino] = replace(record, ctime_ns=time.time_ns(), **wanted)
        return self.node(ino)

    async def create(self, parent: Inode, name: bytes, mode: int, flags: int, actor: Actor) -> tuple[Handle, Node]:
        node = self.add(parent, name, InodeRecord(mode, 1, actor.uid, actor.gid, 0))
        return self.opened(node.ino), node

    async def open(self, ino: Inode, flags: int, actor: Actor) -> Handle:
        self.event(request="open", truncate=bool(flags & os.O_TRUNC))
        if flags & os.O_TRUNC:
            self.resize(ino, 0)
        return self.opened(ino)

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        content = self.content[self.handles[handle]]
        if content.startswith(b"hang"):
            self.event(request="hang")
            await trio.sleep_forever()
        return bytes(content[offset : offset + size])

    async def write(self, handle: Handle, offset: int, data: bytes, *, given_up: object = None) -> int:
        if data.startswith(b"wait"):
            self.event(request="wait")
            await trio.sleep_forever()
        ino = self.handles[handle]
        if len(self.content[ino]) < offset + len(data):
            self.resize(ino, offset + len(data))
        self.content[ino][offset : offset + len(data)] = data
        return len(data)

    async def flush(self, handle: Handle, *, dying: bool = False) -> None:
        self.event(request="flush", dying=dying)

    async def fsync(self, handle: Handle, *, datasync: bool) -> None:
        self.event(request="fsync", datasync=datasync)

    async def release(self, handle: Handle) -> None:
        del self.handles[handle]
        self.event(request="release")

    async def mknod(self, parent: Inode, name: bytes, mode: int, rdev: int, actor: Actor) -> Node:
        return self.add(parent, name, InodeRecord(mode, 1, actor.uid, actor.gid, 0, rdev=rdev))

    async def mkdir(self, parent: Inode, name: bytes, mode: int, actor: Actor) -> Node:
        return self.add(parent, name, InodeRecord(mode, 2, actor.uid, actor.gid, 0))

    async def symlink(self, parent: Inode, name: bytes, target: bytes, actor: Actor) -> Node:
        mode = stat.S_IFLNK | 0o777
        return self.add(parent, name, InodeRecord(mode, 1, actor.uid, actor.gid, len(target), target=target))

    async def link(self, ino: Inode, new_parent: Inode, new_name: bytes) -> Node:
        self.names[new_parent][new_name] = (self.number(), ino)
        self.records[ino] = replace(self.records[ino], nlink=self.records[ino].nlink + 1)
        return self.node(ino)

    async def unlink(self, parent: Inode, name: bytes) -> None:
        _, ino = self.names[parent].pop(name)
        self.records[ino] = replace(self.records[ino], nlink=self.records[ino].nlink - 1)

    async def rmdir(self, parent: Inode, name: bytes) -> None:
        if self.names[self.names[parent][name][1]]:
            raise Refused(errno.ENOTEMPTY)
        del self.names[parent][name]

    async def rename(self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int) -> None:
        if flags and new_name in self.names[new_parent]:
            raise Refused(errno.EEXIST)
        _, ino = self.names[parent].pop(name)
        self.names[new_parent][new_name] = (self.number(), ino)

    async def readlink(self, ino: Inode) -> bytes:
        return self.records[ino].target

    async def opendir(self, ino: Inode, actor: Actor) -> Handle:
        return self.opened(ino)

    async def readdir(self, handle: Handle, start_id: int) -> Iterator[DirectoryItem]:
        present = sorted((place, name, ino) for name, (place, ino) in self.names[self.handles[handle]].items())
        return (DirectoryItem(name, self.node(ino), place) for place, name, ino in present if place > start_id)

    async def releasedir(self, handle: Handle) -> None:
        del self.handles[handle]

    async def fsyncdir(self, handle: Handle) -> None:
        self.event(request="fsyncdir")

    async def statfs(self) -> FilesystemFigures:
        return FilesystemFigures(4096, 1 << 40, 1 << 39, 1000, 900)

    async def getxattr(self, ino: Inode, name: bytes) -> bytes:
        self.event(request="getxattr", name=os.fsdecode(name))
        try:
            return self.xattrs[ino][name]
        except KeyError:
            raise Refused(errno.ENODATA) from None

    async def setxattr(self, ino: Inode, name: bytes, value: bytes) -> None:
        self.xattrs.setdefault(ino, {})[name] = value

    async def listxattr(self, ino: Inode) -> list[bytes]:
        return list(self.xattrs.get(ino, ()))

    async def removexattr(self, ino: Inode, name: bytes) -> None:
        if self.xattrs.get(ino, {}).pop(name, None) is None:
            raise Refused(errno.ENODATA)

    def remember(self, ino: Inode) -> None:
        self.known[ino] = self.known.get(ino, 0) + 1

    def forget(self, pairs: list[tuple[Inode, int]]) -> None:
        for ino, count in pairs:
            self.known[ino] -= count
            assert self.known[ino] >= 0, "the kernel gave back more than it was handed"
        self.event(request="forget", count=sum(count for _, count in pairs))


@dataclass
class Mounted:
    """A mounted tiny filesystem and its process."""

    path: Path
    cache: Path
    process: subprocess.Popen[str]
    report: dict[str, Any] = field(default_factory=dict)

    def events(self, request: str) -> list[dict[str, Any]]:
        lines = (self.cache / "events.jsonl").read_text().splitlines() if (self.cache / "events.jsonl").exists() else []
        return [event for line in lines if (event := json.loads(line))["request"] == request]

    def await_events(self, request: str, count: int) -> list[dict[str, Any]]:
        """Wait until that many were seen: RELEASE comes late (M6)."""
        wait_until(lambda: len(self.events(request)) >= count, f"{count} x {request}")
        return self.events(request)

    def log(self) -> str:
        return (self.cache / "daemon.log").read_text()


def wait_until(condition: Any, what: str, deadline_s: float = START_DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"still waiting for: {what}"
        time.sleep(0.01)


def daemon_argv(path: Path, cache: Path, **options: Any) -> list[str]:
    return [sys.executable, __file__, str(path), str(cache), "--options", json.dumps(options)]


def detach(path: Path) -> None:
    """Take everything off *path* and make it removable, whatever the test left there."""
    while any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        subprocess.run(["fusermount3", "-u", "-z", str(path)], check=False, capture_output=True)
    subprocess.run(["chattr", "-i", str(path)], check=False, capture_output=True)
    if path.is_dir():
        path.chmod(0o755)


@contextmanager
def mounted(tmp_path: Path, **options: Any) -> Iterator[Mounted]:
    """Mount a tiny filesystem at `tmp_path/mnt` with its cache at `tmp_path/cache`."""
    path, cache = tmp_path / "mnt", tmp_path / "cache"
    for directory in (path, cache):
        with suppress(FileExistsError):  # a dead mount exists, but says nothing more about itself
            os.mkdir(directory)
    with open(cache / "daemon.log", "a") as log:
        process = subprocess.Popen(daemon_argv(path, cache, **options), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (cache / "daemon.log").read_text()
        yield Mounted(path, cache, process, json.loads(line))
    finally:
        detach(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


async def until_sigterm(serving: Coroutine[Any, Any, None]) -> None:
    """Cancel *serving* at SIGTERM, as a daemon does whose drain has ended."""
    async with trio.open_nursery() as nursery:

        async def wait_for_signal() -> None:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(wait_for_signal)
        await serving
        nursery.cancel_scope.cancel()


def main() -> int:
    """Serve until unmounted."""
    from spotwarp_fs.fuse import readiness
    from spotwarp_fs.fuse.mounting import MountOptions
    from spotwarp_fs.fuse.serving import serve
    from spotwarp_fs.fuse.tuning import TuningReport

    parser = argparse.ArgumentParser()
    parser.add_argument("mountpoint")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--restarted", action="store_true", help="what the supervisor says from the second start on")
    given = parser.parse_args()
    if "exit" in given.options:
        return int(given.options["exit"])

    def ready(report: TuningReport) -> None:
        print(json.dumps({"done": report.done, "refused": report.refused}), flush=True)
        if given.ready_fd is not None:
            readiness.report_ready(given.ready_fd, "mounted")

    code = ExitCode.OK
    fs = Tiny(given.cache / "events.jsonl")
    options = MountOptions(mountpoint=given.mountpoint, cache_dir=given.cache, **{"workspace": "tiny", **given.options})
    try:
        trio.run(lambda: until_sigterm(serve(fs, options, ready=ready)))
    except* SpotwarpError as group:
        error = group.exceptions[0]
        assert isinstance(error, SpotwarpError)
        print(error, file=sys.stderr)
        if given.ready_fd is not None:
            readiness.report_failure(given.ready_fd, str(error), error.exit_code)
        code = error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
