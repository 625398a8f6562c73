"""Mount a workspace and serve it until it is unmounted; the one place that drives pyfuse3's session.

Invariant: one mount per process (pyfuse3 keeps its session in globals), and whatever way `serve` ends, the channel to
the kernel is closed: every request still waiting fails, and nobody hangs on this mount.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyfuse3
import trio

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.fuse import handshake, mounting, requestloop, tuning, underlay
from spotwarp_fs.fuse.mountinfo import mounts_at
from spotwarp_fs.fuse.operations import Operations
from spotwarp_fs.fuse.port import Filesystem

log = logging.getLogger(__name__)


async def serve(
    fs: Filesystem, options: mounting.MountOptions, *, ready: Callable[[tuning.TuningReport], None]
) -> None:
    """Mount, call *ready* when the mount answers and is tuned, serve; return once it was unmounted.

    To stop: unmount (`mounting.unmount` in a worker thread) and this returns after the last release, with the directory
    below writable again. When cancelled, waiting requests are given up, the mount is detached, and the directory below
    stays closed off: a trainer that runs on must not write there. Raises UserError if the mount is impossible.
    """
    mounting.check_fuse()
    mountpoint = await trio.to_thread.run_sync(mounting.prepare_mountpoint, options, limiter=trio.CapacityLimiter(1))
    below = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _mount(fs, mountpoint, options)
        try:
            device = _devices_at(mountpoint)[-1]
            requestloop.take_over(handshake.begin())
            underlay.close_off(below, mountpoint, options.underlay_record)
            log.info("mounted mountpoint=%s workspace=%s", mountpoint, options.workspace)
            await _answer_requests(mountpoint, options, ready)
            unmounted = device not in _devices_at(mountpoint)
        finally:
            pyfuse3.close(unmount=True)
    finally:
        os.close(below)
    if unmounted:
        underlay.reopen(mountpoint, options.underlay_record)
    log.info("mount ended mountpoint=%s unmounted=%s", mountpoint, unmounted)


def _devices_at(mountpoint: str) -> list[int]:
    return [entry.minor for entry in mounts_at(mountpoint)]


def _mount(fs: Filesystem, mountpoint: str, options: mounting.MountOptions) -> None:
    operations = Operations(fs, xattrs=options.xattrs, writeback_cache=options.writeback_cache)
    with _captured_stderr() as output:
        try:
            pyfuse3.init(operations, mountpoint, mounting.kernel_options(options))
        except RuntimeError as error:
            output.seek(0)
            said = " ".join(output.read().decode(errors="replace").split()) or str(error)
            raise UserError(
                f"FUSE refused to mount {mountpoint}: {said}; if mounting is not permitted here, use "
                "`spotwarp start --workspace DIR` or `spotwarp run --mode directory`",
                ExitCode.NO_FUSE,
            ) from error


@contextmanager
def _captured_stderr() -> Iterator[BinaryIO]:
    """Catch what libfuse has to say: it prints the reason of a failed mount and returns only that it failed."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield output
        finally:
            os.dup2(saved, 2)
            os.close(saved)


async def _answer_requests(
    mountpoint: str, options: mounting.MountOptions, ready: Callable[[tuning.TuningReport], None]
) -> None:
    async def tune() -> None:
        # Its own limiter: trio's default threads may all wait for the store.
        report = await trio.to_thread.run_sync(
            tuning.tune, mountpoint, options, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        for setting, reason in report.refused.items():
            log.warning("mount not tuned setting=%s reason=%s", setting, reason)
        ready(report)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tune)
        await pyfuse3.main(max_tasks=options.tasks_max)
        nursery.cancel_scope.cancel()
