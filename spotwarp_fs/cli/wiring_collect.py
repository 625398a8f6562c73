"""Collect garbage of a workspace: through its mount on this machine, or as a short writer of its own.

Invariant: a tool never fences a running job (H13): while somebody writes, it asks that writer or refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotwarp_fs.cli import client
from spotwarp_fs.cli.reading import run
from spotwarp_fs.cli.wiring_snapshot import mounted_here
from spotwarp_fs.cli.writing import WriterWish, writing

if TYPE_CHECKING:
    from spotwarp_fs.cli.sources import LoadedSettings


def collect(loaded: LoadedSettings, workspace: str, *, dry_run: bool) -> dict[str, Any]:
    """Run one collection and return its figures."""
    settings = loaded.settings
    mounted = mounted_here(settings, workspace)
    if mounted is not None:
        return client.call(mounted, "gc", {"dry_run": dry_run})

    async def collected() -> dict[str, Any]:
        async with writing(settings, WriterWish(workspace, "(no mount: spotwarp gc)")) as session:
            found = await session.collector.collect(dry_run=dry_run)
            await session.streamer.barrier()
            return found

    return run(collected)
