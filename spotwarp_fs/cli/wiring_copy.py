"""Copy out of a workspace: `cp`.

Invariant: DEST means what it means to cp(1): an existing directory receives the copy, anything else is its name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from spotwarp_fs.cli import output
from spotwarp_fs.cli.at import read_at
from spotwarp_fs.cli.copying import Copier, Progress
from spotwarp_fs.cli.options import Location
from spotwarp_fs.cli.reading import opened, run
from spotwarp_fs.cli.wiring_read import walk
from spotwarp_fs.core.errors import UserError

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import CopyReport
    from spotwarp_fs.cli.sources import LoadedSettings


def copy_out(
    loaded: LoadedSettings, where: Location, target: Path, *, at: str | None, recursive: bool, on_progress: Progress
) -> CopyReport:
    """Copy a file or tree out of a workspace, with modes, times, links, xattrs and holes."""
    from spotwarp_fs.cli.reports import CopyReport

    path = os.fsencode(where.path)

    async def copied() -> CopyReport:
        async with opened(loaded.settings, where.workspace, read_at(at)) as reader:
            node = walk(reader, where.workspace, path, follow=not recursive)
            is_directory = stat.S_ISDIR(node.record.mode)
            if is_directory and not recursive:
                raise UserError(f"{where.workspace}:{where.path} is a directory; add -r to copy all of it")
            name = os.path.basename(path) or os.fsencode(where.workspace)
            place = _place(target, name)
            copier = Copier(reader, where.workspace, on_progress)
            await (copier.copy_tree if is_directory else copier.copy_one)(node, place, path)
            for what, times in copier.left_out.items():
                output.warn(f"not kept {times:,} times: {what}")
            return CopyReport(copier.files, copier.bytes_copied, reader.manifest.number)

    return run(copied)


def _place(target: Path, name: bytes) -> bytes:
    """Return the path of the copy."""
    if target.is_dir():
        return os.path.join(os.fsencode(target), name)
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} does not exist; make it first")
    return os.fsencode(target)
