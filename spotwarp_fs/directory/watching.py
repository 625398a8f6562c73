"""Let the kernel say where to look: inotify on every directory of the workspace.

Invariants: between two takes every directory in which a program's calls changed something is named, or `whole` is set;
a directory is named after its watch was added, with all below it, so what was made there before is looked at too.

What gives no event: stores through a mapping, and changes that another machine makes on a network filesystem. Both
show in a complete walk, which is why there is one now and then.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from spotwarp_fs.core.walked import CONTROL_DIRECTORY, join
from spotwarp_fs.directory import inotify
from spotwarp_fs.directory.inotify import Event, Mask
from spotwarp_fs.directory.opening import open_below

HINTS_MAX: Final = 20_000
"""With more directories to look at, a complete walk is cheaper."""
SLICE_S: Final = 0.005
"""So long the event loop may be kept from other things at a time, when watches are added."""
ENTRIES_AT_ONCE: Final = 256
TAKE_READS_MAX: Final = 64
"""So often a take reads what waits in the queue: more than the longest queue that kernels have by default."""
RETRY_S: Final = 60.0
"""So long after the limit was met it is tried again."""

_EVENTS: Final = int(
    Mask.MODIFY | Mask.CLOSE_WRITE | Mask.ATTRIB | Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO
    | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR | Mask.EXCL_UNLINK
)  # fmt: skip
_DIRECTORY: Final = int(Mask.ISDIR)
_ARRIVED: Final = int(Mask.CREATE | Mask.MOVED_TO | Mask.ATTRIB)
_LEFT: Final = int(Mask.DELETE | Mask.MOVED_FROM)
_OF_ITSELF: Final = int(Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED)
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_STARTING: Final = "watches are being added"


@dataclass(frozen=True, slots=True)
class Hints:
    """Where to look."""

    directories: frozenset[bytes]
    whole: bool
    """Everywhere: *reason* says why."""
    reason: str
    since_s: float | None
    """Trio's time of the oldest event."""


class _Node:
    """A watched directory."""

    __slots__ = ("children", "name", "parent", "watch")

    def __init__(self, parent: _Node | None, name: bytes, watch: int) -> None:
        self.parent = parent
        self.name = name
        self.watch = watch
        self.children: dict[bytes, _Node] = {}

    def path(self) -> bytes:
        names = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        return b"/".join(reversed(names))


class Watcher:
    """The watches of one directory tree, and what they have told."""

    def __init__(self, root: bytes, skip: Callable[[bytes], bool]) -> None:
        self._path = root
        self._root = -1
        self._skip = skip
        self._queue: int | None = None
        self._off = ""
        self._directories: set[bytes] = set()
        self._whole = ""
        self._since_s: float | None = None
        self._happened = trio.Event()
        self._work = trio.Event()
        self._unwatched: set[bytes] = set()
        self._tried_s = 0.0
        self._start()

    @property
    def unwatched(self) -> int:
        """How many directories have no watch because of the user's limit."""
        return len(self._unwatched)

    @property
    def watched(self) -> int:
        """How many directories have a watch."""
        return len(self._nodes)

    @property
    def state(self) -> str:
        """`intact`, or what is wrong and what to do about it."""
        if self._off:
            return f"off: {self._off}"
        if self._unwatched:
            limit = inotify.watches_max()
            return (
                f"partial: {len(self._unwatched)} directories not watched, "
                f"raise fs.inotify.max_user_watches from {limit if limit is not None else 'its present value'}"
            )
        return f"partial: {len(self._nodes)} directories watched so far" if self._starting else "intact"

    def take(self) -> Hints:
        """Return where something has happened since the last take, and begin anew.

        Everything that a program did before is in it, or `whole` is set.
        """
        self._drain(TAKE_READS_MAX)
        self._add_for(SLICE_S)
        whole = self._off or self._whole or self._partial()
        hints = Hints(frozenset(self._directories), bool(whole), whole, self._since_s)
        self._directories.clear()
        self._since_s = None
        if self._happened.is_set():
            self._happened = trio.Event()
        if self._overflown:
            self._start()
        self._whole = _STARTING if self._starting else ""
        return hints

    async def changed(self) -> None:
        """Wait until there is something to take."""
        await self._happened.wait()

    def _partial(self) -> str:
        if not self._unwatched:
            return _STARTING if self._to_add else ""
        reason = self.state
        if trio.current_time() - self._tried_s >= RETRY_S:
            self._tried_s = trio.current_time()
            self._to_add.extend(sorted(self._unwatched))
            self._unwatched.clear()
            self._work.set()
        return reason

    # Beginning, and beginning again when events were lost.

    def _start(self) -> None:
        self.close()
        self._nodes: dict[int, _Node] = {}
        self._top: _Node | None = None
        self._to_add: deque[bytes] = deque([b""])
        self._adding = self._add_all()
        self._unwatched.clear()
        self._starting = True
        self._overflown = False
        self._whole = _STARTING
        try:
            self._root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._device = os.fstat(self._root).st_dev
            self._queue = inotify.create()
        except OSError as error:
            self._turn_off(f"inotify cannot be used: {error.strerror}")
        self._work.set()

    def close(self) -> None:
        """Let go of all watches."""
        if self._queue is not None:
            trio.lowlevel.notify_closing(self._queue)
            os.close(self._queue)
            self._queue = None
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        self._starting = False
        self._note_whole(reason)
        self.close()

    async def run(self) -> None:
        """Read and add, until cancelled."""
        while True:
            if self._queue is None or self._overflown:
                self._work = trio.Event()
                await self._work.wait()
                continue
            if self._to_add:
                self._add_for(SLICE_S)
                await trio.lowlevel.checkpoint()
            else:
                try:
                    await trio.lowlevel.wait_readable(self._queue)
                except trio.ClosedResourceError:
                    continue
            self._drain(1)

    # Events.

    def _drain(self, reads_max: int) -> None:
        for _ in range(reads_max):
            if self._queue is None or self._overflown:
                return
            try:
                events = list(inotify.read_events(self._queue))
            except BlockingIOError:
                return
            for event in events:
                self._take_in(event)
        if reads_max > 1:
            self._note_whole("events come faster than they are read")

    def _take_in(self, event: Event) -> None:
        watch, mask, name = event
        if mask & Mask.Q_OVERFLOW:
            self._overflown = True
            self._note_whole("the queue of inotify ran over, see fs.inotify.max_queued_events")
            return
        node = self._nodes.get(watch)
        if node is None:
            return  # forgotten meanwhile: its directory was named where it has gone, or where it was
        if mask & _OF_ITSELF:
            self._of_itself(node, mask)
            return
        path = node.path()
        if name:
            child = join(path, name)
            is_directory = bool(mask & _DIRECTORY)
            if child == CONTROL_DIRECTORY or ((is_directory or path not in self._directories) and self._skip(child)):
                return
            if is_directory:
                self._directory_event(node, child, mask)
        self._note(path)

    def _directory_event(self, node: _Node, child: bytes, mask: int) -> None:
        known = node.children.get(child.rpartition(b"/")[2])
        if mask & _LEFT and known is not None:
            self._forget(known)
        elif mask & _ARRIVED and (known is None or not mask & Mask.ATTRIB):
            self._to_add.append(child)

    def _of_itself(self, node: _Node, mask: int) -> None:
        if node is self._top:
            self._turn_off("the watched directory was moved, removed or unmounted; start again")
        elif mask & Mask.UNMOUNT:
            self._note_whole("something was unmounted")
        if mask & ~Mask.MOVE_SELF & _OF_ITSELF:
            self._forget(node)

    def _note(self, path: bytes) -> None:
        self._directories.add(path)
        if len(self._directories) > HINTS_MAX:
            self._directories.clear()
            self._whole = f"more than {HINTS_MAX} directories to look at"
        if self._since_s is None:
            self._since_s = trio.current_time()
        self._happened.set()

    def _note_whole(self, reason: str) -> None:
        self._whole = reason
        if self._since_s is None:
            self._since_s = trio.current_time()
        self._happened.set()

    # Watches.

    def _add_for(self, seconds: float) -> None:
        until = trio.current_time() + seconds
        while self._to_add and self._queue is not None and not self._overflown:
            next(self._adding)
            if trio.current_time() >= until:
                return

    def _add_all(self) -> Iterator[None]:
        """Add watch after watch, for ever; gives way after each few steps."""
        while True:
            if not self._to_add:
                yield
                continue
            path = self._to_add[0]
            for count, name in enumerate(self._add(path)):
                child = join(path, name)
                if child != CONTROL_DIRECTORY and not self._skip(child):
                    self._to_add.append(child)
                if count % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                    yield
            # It stays in the queue until all below it is there too: as long, everything must be looked at.
            self._to_add.popleft()
            if not self._starting:
                self._note(path)
            elif not self._to_add:
                self._starting = False
                self._note_whole("watches were added")
            yield

    def _add(self, path: bytes) -> Iterator[bytes]:
        """Watch one directory, then give the names of the directories in it."""
        assert self._queue is not None, "without a queue nothing is added"
        try:
            descriptor = open_below(self._root, path)
        except OSError as error:
            # Gone already, or closed to us: the walk will say so.
            if error.errno in _EXHAUSTED:
                self._without_watch(path)
            return
        try:
            status = os.fstat(descriptor)
            parent = self._node(path.rpartition(b"/")[0]) if path else None
            if status.st_dev != self._device or (path and parent is None):
                return
            self._watch(path, parent, descriptor)
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        yield os.fsencode(entry.name)
        except OSError:
            return
        finally:
            os.close(descriptor)

    def _watch(self, path: bytes, parent: _Node | None, descriptor: int) -> None:
        assert self._queue is not None, "without a queue nothing is watched"
        try:
            watch = inotify.add_watch(self._queue, b"/proc/self/fd/%d" % descriptor, _EVENTS)
        except OSError as error:
            if error.errno != errno.EACCES:
                self._without_watch(path)
            return
        name = path.rpartition(b"/")[2]
        before = parent.children.get(name) if parent is not None else None
        if before is not None and before.watch != watch:
            self._forget(before)
            before = None
        node = before or _Node(parent, name, watch)
        # A directory that has come from elsewhere keeps its number; the events that say so are still in the queue.
        self._nodes[watch] = node
        if parent is None:
            self._top = node
        else:
            parent.children[name] = node

    def _without_watch(self, path: bytes) -> None:
        self._unwatched.add(path)
        self._tried_s = trio.current_time()

    def _node(self, path: bytes) -> _Node | None:
        node = self._top
        for name in path.split(b"/") if path else ():
            node = node.children.get(name) if node is not None else None
        return node

    def _forget(self, node: _Node) -> None:
        """Drop the watches of *node* and of all below it."""
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        pending = [node]
        while pending:
            below = pending.pop()
            pending.extend(below.children.values())
            if self._nodes.get(below.watch) is not below:
                continue
            del self._nodes[below.watch]
            if self._queue is not None:
                try:
                    inotify.remove_watch(self._queue, below.watch)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the kernel has forgotten it with its directory
                        raise


@asynccontextmanager
async def watch(root: bytes, *, skip: Callable[[bytes], bool]) -> AsyncIterator[Watcher]:
    """Watch the tree at *root*; *skip* says of a path whether it is scratch, where nobody looks.

    Never fails: where there is no inotify, or not enough of it, every take says `whole`, and `state` says why.
    """
    watcher = Watcher(root, skip)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            yield watcher
            nursery.cancel_scope.cancel()
    finally:
        watcher.close()
