"""List and print what a store holds: `ls` and `cat`, from any machine, without a mount.

Invariant: nothing here writes to a workspace; a running job is not disturbed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, Final

import trio

from spotwarp_fs.cli import output
from spotwarp_fs.cli.at import read_at
from spotwarp_fs.cli.options import Location
from spotwarp_fs.cli.reading import at_path, opened, run
from spotwarp_fs.cli.stores import find_workspace, open_store_of, workspace_names
from spotwarp_fs.core.errors import Denied, SpotwarpError, Unavailable, UserError
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Node
from spotwarp_fs.engine.heartbeat import read_beat
from spotwarp_fs.engine.publish import find_head
from spotwarp_fs.engine.reader import Reader
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.local.system import SystemEntropy

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import ListedFile, WorkspaceLine
    from spotwarp_fs.cli.sources import LoadedSettings

WORKSPACES_AT_ONCE: Final = 8
ZEROS_BYTES: Final = 1 << 20
_KINDS: Final = {
    stat.S_IFREG: "-",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFSOCK: "s",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
    stat.S_IFIFO: "p",
}


def list_workspaces(loaded: LoadedSettings) -> Iterator[WorkspaceLine]:
    """Give the workspaces of the store by name; one that cannot be read is a warning."""

    async def lines() -> list[WorkspaceLine]:
        store = open_store_of(loaded.settings)
        found: dict[str, WorkspaceLine] = {}
        slots = trio.Semaphore(WORKSPACES_AT_ONCE)

        async def one(name: str) -> None:
            async with slots:
                try:
                    found[name] = await _workspace_line(store, name)
                except (Unavailable, Denied):
                    raise
                except SpotwarpError as error:
                    output.warn(f"{name}: {error}")

        try:
            async with trio.open_nursery() as nursery:
                for name in await workspace_names(store):
                    nursery.start_soon(one, name)
        finally:
            await store.aclose()
        return [found[name] for name in sorted(found)]

    return iter(run(lines))


async def _workspace_line(store: ObjectStore, name: str) -> WorkspaceLine:
    from spotwarp_fs.cli.reports import WorkspaceLine

    _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
    found = await find_head(scoped)
    if found is None:
        return WorkspaceLine(name, 0, 0.0, 0, 0, False)
    head, now_s = found
    beat = await read_beat(scoped)
    live = (
        beat is not None and beat.writer_epoch == head.manifest.writer_epoch and beat.age_s < EngineSettings().lease_s
    )
    # The first manifest of a workspace is made before its writer has seen the store's clock.
    age_s = max(0.0, now_s - head.manifest.created_s) if head.manifest.created_s else 0.0
    return WorkspaceLine(name, head.manifest.number, age_s, head.manifest.logical_bytes, head.manifest.files, live)


def list_files(loaded: LoadedSettings, where: Location, *, at: str | None, recursive: bool) -> Iterator[ListedFile]:
    """Give the file at *where*, or what a directory holds, by name; raises NotFound.

    Names are relative to the directory that is listed.
    """
    path = os.fsencode(where.path)

    async def files() -> list[ListedFile]:
        async with opened(loaded.settings, where.workspace, read_at(at)) as reader:
            node = walk(reader, where.workspace, path)
            if not stat.S_ISDIR(node.record.mode):
                return [_listed(path, node)]
            if recursive:
                return [_listed(name, found) for name, found in reader.subtree(node.ino) if name]
            return [_listed(name, found) for name, found in reader.children(node.ino)]

    return iter(run(files))


def walk(reader: Reader, workspace: str, path: bytes, *, follow: bool = False) -> Node:
    """Find a path in a state; raises NotFound that names both."""
    try:
        return reader.walk(path, follow=follow)
    except SpotwarpError as error:
        raise at_path(error, workspace, path) from error


def _listed(path: bytes, node: Node) -> ListedFile:
    from spotwarp_fs.cli.reports import ListedFile

    record = node.record
    is_link = stat.S_ISLNK(record.mode)
    return ListedFile(
        path,
        _KINDS.get(stat.S_IFMT(record.mode), "?"),
        record.mode,
        record.uid,
        record.gid,
        record.nlink,
        record.size,
        record.mtime_ns,
        record.target if is_link else None,
    )


def read_file(loaded: LoadedSettings, where: Location, *, at: str | None, sink: BinaryIO) -> int:
    """Write a file's bytes to *sink* and return their number; raises NotFound, Corrupt."""
    path = os.fsencode(where.path)

    async def copied() -> int:
        async with opened(loaded.settings, where.workspace, read_at(at)) as reader:
            node = walk(reader, where.workspace, path, follow=True)
            if not stat.S_ISREG(node.record.mode):
                raise UserError(f"{where.workspace}:{where.path} is not a file; `spotwarp ls` lists directories")
            try:
                await _write_all(reader, node, sink)
            except SpotwarpError as error:
                raise at_path(error, where.workspace, path) from error
            return node.record.size

    return run(copied)


async def _write_all(reader: Reader, node: Node, sink: BinaryIO) -> None:
    """Write pieces and the zeros between them; in threads, since a pipe's reader may take its time."""
    position = 0
    async with reader.content(node) as pieces:
        async for piece in pieces:
            await _write_zeros(sink, piece.offset - position)
            await trio.to_thread.run_sync(sink.write, piece.data)
            position = piece.offset + len(piece.data)
    await _write_zeros(sink, node.record.size - position)


async def _write_zeros(sink: BinaryIO, count: int) -> None:
    while count > 0:
        step = min(count, ZEROS_BYTES)
        await trio.to_thread.run_sync(sink.write, bytes(step))
        count -= step
