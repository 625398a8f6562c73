"""Note what is read in the first minutes of a session, and have the next manifest carry it.

Invariant: what was read is never a reason to publish (M-d). The row changes only in the step of a cut that has
something else to say, and only a few times per session; memory is bounded by the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import trio

from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import TREE_TABLES, NodeTable, key_ino, table_range
from spotwarp_fs.core.scratch import is_scratch
from spotwarp_fs.core.trace import TRACE_KEY, Entry, Roles, decode, encode, extents_of, merged
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.engine.files import Files
from spotwarp_fs.engine.rebase import NewBase
from spotwarp_fs.engine.stream import Streamer
from spotwarp_fs.engine.workspace import Workspace

ROLES_KEPT_S = 5.0
"""A checkpoint that appears while the session starts is noticed after this."""
ROWS_LOOKED_AT_MAX = 1000
"""With more changes than this that are all scratch, the trace waits for another cut."""


class Tracer:
    """Records one session's start."""

    def __init__(self, workspace: Workspace, stop: Callable[[], None]) -> None:
        self._ws = workspace
        self._stop = stop
        """Ends the telling of reads."""
        self._read: dict[Inode, set[BlockIndex]] = {}
        self._roles: dict[Inode, bytes] = {}
        self._blocks = 0
        self._blocks_written = 0
        self._finder = Roles(workspace.policies)
        self._finder_since_s = -1e9
        self._deadline_s: float | None = None
        self._before: tuple[Entry, ...] | None = None
        """What earlier starts had read, as this session found it."""

    def note(self, ino: Inode, first: BlockIndex, last: BlockIndex) -> None:
        """Blocks of a file are being read."""
        now = trio.current_time()
        if self._deadline_s is None:
            self._deadline_s = now + self._ws.settings.trace_s
        if now > self._deadline_s or self._blocks * BLOCK_BYTES >= self._ws.settings.trace_bytes_max:
            self._stop()
            return
        blocks = self._read.get(ino)
        if blocks is None:
            if len(self._read) >= self._ws.settings.trace_files_max:
                self._stop()
                return
            blocks = self._read[ino] = set()
            self._note_role(ino, now)
        before = len(blocks)
        blocks.update(BlockIndex(block) for block in range(first, last + 1))
        self._blocks += len(blocks) - before

    def _note_role(self, ino: Inode, now_s: float) -> None:
        """Say what the file is now: later the newest checkpoint may be another one."""
        if now_s - self._finder_since_s > ROLES_KEPT_S:
            self._finder, self._finder_since_s = Roles(self._ws.policies), now_s
        with self._ws.kv.read() as view:
            role = None if is_scratch(view, ino) else self._finder.role_of(view, ino)
        if role is not None:
            self._roles[ino] = role

    def rows_before_cut(self, view: KVRead, base: NewBase | None) -> Mapping[bytes, bytes | None]:
        """Give the row if it is complete or has grown a lot since the last one, and if the cut publishes anyway."""
        complete = self._deadline_s is not None and trio.current_time() > self._deadline_s
        enough = self._blocks > self._blocks_written if complete else self._blocks >= 2 * self._blocks_written
        if not self._roles or not enough or not _something_changed(view):
            return {}
        if self._before is None:
            self._before = decode(view.get(TRACE_KEY))
        self._blocks_written = self._blocks
        value = encode(merged(self._entries(), self._before))
        return {TRACE_KEY: value} if value != view.get(TRACE_KEY) else {}

    def _entries(self) -> list[Entry]:
        found: dict[bytes, Entry] = {}
        for ino, role in self._roles.items():
            found.setdefault(role, Entry(role, extents_of(self._read[ino])))
        return list(found.values())


def trace_reads(workspace: Workspace, files: Files, streamer: Streamer) -> Tracer:
    """Record this session's start."""

    def stop() -> None:
        files.on_read = None

    tracer = Tracer(workspace, stop)
    files.on_read = tracer.note
    streamer.before_cut.append(tracer.rows_before_cut)
    return tracer


def _something_changed(view: KVRead) -> bool:
    """The cut has more to say than what scratch files did."""
    for _, key in islice(view.scan(*table_range(NodeTable.CHANGELOG)), ROWS_LOOKED_AT_MAX):
        if key[:1] not in TREE_TABLES or not is_scratch(view, key_ino(key)):
            return True
    return False
