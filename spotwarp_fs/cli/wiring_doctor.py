"""Look at the store for `doctor`: does it answer, may we in, does it keep two writers apart, what locks lie in a state.

Invariant: each finding names the remedy for just that failure; a store that was only read is called "not tried".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from spotwarp_fs.cli.reading import opened, run
from spotwarp_fs.cli.stores import open_plain_store, open_store_of, workspace_names
from spotwarp_fs.core.errors import Denied, ExitCode, SpotwarpError, StoreRefused, Unavailable, Unsupported
from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.engine.states import Latest
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.store.probe import SKEW_MAX_S, ProbeReport, probe

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import Check
    from spotwarp_fs.cli.settings import Settings
    from spotwarp_fs.cli.sources import LoadedSettings

LOCK_NAMES: Final = ("*.lock", "*-journal", "*-wal", "*.pid", "pidfile", "lockfile", ".lock", ".~lock.*")
SHOWN_MAX: Final = 20


def probe_store(loaded: LoadedSettings, *, write: bool) -> Iterator[Check]:
    """Check that the store answers; with *write*, that it honours what safe writing needs (P-16)."""
    from spotwarp_fs.cli.reports import Check

    settings = loaded.settings
    url = settings.store_url()
    try:
        names = run(lambda: _names(settings))
    except SpotwarpError as error:
        yield Check("store", "fail", f"{url}: {error}", _remedy(error), error.exit_code)
        return
    count = f"{len(names):,} workspaces" if len(names) != 1 else "1 workspace"
    yield Check("store", "ok", f"{url} answers and may be listed; it has {count}")
    if not write:
        yield Check("conditional writes", "warn", "not tried (--read-only)", "run doctor without --read-only")
        return
    try:
        report = run(lambda: _probed(settings))
    except SpotwarpError as error:
        yield _failed_probe(error, unsafe=settings.unsafe_single_writer)
        return
    yield from _findings(report)


async def _names(settings: Settings) -> list[str]:
    store = open_store_of(settings)
    try:
        return await workspace_names(store)
    finally:
        await store.aclose()


async def _probed(settings: Settings) -> ProbeReport:
    store, small_pages = open_plain_store(settings), open_plain_store(settings, list_page_keys=2)
    try:
        return await probe(store, SystemEntropy(), wall=SystemWall(), small_pages=small_pages)
    finally:
        await store.aclose()
        await small_pages.aclose()


def _failed_probe(error: SpotwarpError, *, unsafe: bool) -> Check:
    from spotwarp_fs.cli.reports import Check

    if not isinstance(error, Unsupported):
        return Check("store writes", "fail", str(error), _remedy(error), error.exit_code)
    if unsafe:
        return Check("conditional writes", "warn", f"{error}; unsafe_single_writer is set: never let two writers run")
    return Check("conditional writes", "fail", str(error), "", ExitCode.STORE_UNSUITABLE)


def _findings(report: ProbeReport) -> Iterator[Check]:
    from spotwarp_fs.cli.reports import Check

    yield Check("conditional writes", "ok", "of two writers, one wins")
    if not report.stale_match_refused:
        yield Check("If-Match", "warn", "is ignored on PUT: hints may overwrite each other", "nothing needs to be done")
    if not report.listing_complete:
        yield Check("listing", "warn", "misses keys when it is continued", "`ls` and collection may be incomplete")
    skew_s = report.clock_skew_s
    if skew_s is not None and abs(skew_s) > SKEW_MAX_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        remedy = "set this node's clock: collection refuses to run like this"
        yield Check("clock", "warn", f"the store is {abs(skew_s):.0f} s {ahead} this node", remedy)
    elif skew_s is not None:
        yield Check("clock", "ok", f"store and node differ by {abs(skew_s):.1f} s")


def _remedy(error: SpotwarpError) -> str:
    """Say what to do about a store that cannot be used."""
    match error:
        case Denied():
            return "check the keys (environment, profile, instance role), and what they may do in the bucket"
        case Unavailable():
            return "check the endpoint, the network and the proxy; the store itself may be down"
        case StoreRefused(exit_code=ExitCode.CONFIG):
            return "create the bucket, or correct its name, the region or the endpoint"
        case _:
            return ""


def stale_locks(loaded: LoadedSettings, workspace: str) -> Iterator[Check]:
    """Look through the head of a workspace for locks and sockets of programs that a lost node took with it (D13)."""
    from spotwarp_fs.cli.reports import Check

    async def found() -> list[str]:
        async with opened(loaded.settings, workspace, Latest()) as reader:
            return [os.fsdecode(path) for path, node in reader.subtree(ROOT_INODE) if _is_lock(path, node.record.mode)]

    name = f"workspace {workspace}"
    try:
        paths = run(found)
    except SpotwarpError as error:
        yield Check(name, "fail", str(error), "", error.exit_code)
        return
    if not paths:
        yield Check(name, "ok", "no lock files, pid files or sockets")
        return
    more = f" and {len(paths) - SHOWN_MAX:,} more" if len(paths) > SHOWN_MAX else ""
    remedy = "they come back with the workspace: delete those whose program no longer runs"
    yield Check(name, "warn", f"locks, pid files or sockets: {', '.join(paths[:SHOWN_MAX])}{more}", remedy)


def _is_lock(path: bytes, mode: int) -> bool:
    if stat.S_ISSOCK(mode):
        return True
    name = os.fsdecode(os.path.basename(path))
    return stat.S_ISREG(mode) and any(fnmatchcase(name, glob) for glob in LOCK_NAMES)
