"""`spotwarp doctor`: check this machine, the configuration, the cache's disk, the mounts and the store.

Invariant: one broken thing never hides the next: every check ends in a finding, and the exit code is that of the first
failure.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for, store_option, workspace_option
from spotwarp_fs.cli.reports import Check
from spotwarp_fs.core.errors import ExitCode, SpotwarpError
from spotwarp_fs.core.units import format_size, parse_size

if TYPE_CHECKING:
    from spotwarp_fs.cli.sources import LoadedSettings

DESCRIPTORS_MIN: Final = 4096
MARKS: Final = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}
LOCK_FILES: Final = (".git/index.lock", ".git/HEAD.lock", ".git/config.lock", "*.lock", "*-journal", "*-wal")
LOCK_DIRECTORIES_MAX: Final = 2000


@click.command("doctor")
@click.option("--read-only", is_flag=True, help="Don't write the probe objects into the store.")
@click.option("--quick", is_flag=True, help="Don't measure how long a save takes.")
@click.option("--save", metavar="SIZE", default="140G", show_default=True, help="The size of your job's saves.")
@workspace_option
@store_option
@json_option
def command(read_only: bool, quick: bool, save: str, workspace: str | None, store: str | None, as_json: bool) -> int:
    """Check this machine, the configuration and the store, and say what to do about each finding.

    The store is probed with a few small objects below `hints/probe/`, which are deleted again: whether it honours
    conditional writes decides whether two writers can ever destroy each other's work. With --workspace its newest state
    is looked through for lock files, pid files and sockets of programs that are gone.

    A short write to the cache's disk, and one through a trial mount, tell how long a save of --save bytes would block
    in either form: 256 MiB each at most, which are deleted again.
    """
    found: list[Check] = []
    save_bytes = None if quick else parse_size(save)
    for check in checks(store, write=not read_only, save_bytes=save_bytes, workspace=workspace):
        found.append(check)
        if not as_json:
            _show(check)
    failed = next((check for check in found if check.outcome == "fail"), None)
    if as_json:
        output.print_json({"ok": failed is None, "checks": [asdict(check) for check in found]})
    return failed.exit_code if failed else ExitCode.OK


def _show(check: Check) -> None:
    from rich.text import Text

    mark, style = MARKS[check.outcome]
    line = Text.assemble((mark, style), f" {check.name}: {output.printable(check.detail)}")
    if check.remedy:
        line.append(f"\n  → {output.printable(check.remedy)}")
    output.console().print(line)


def checks(
    store: str | None, *, write: bool, save_bytes: int | None = None, workspace: str | None = None
) -> Iterator[Check]:
    """Give every finding, machine first; *save_bytes* measures how long a save of that size would take."""
    from spotwarp_fs.cli import wiring

    yield Check("python", "ok", f"{sys.version.split()[0]} on {sys.platform}")
    yield from fuse_checks()
    yield descriptor_check()
    try:
        loaded = settings_for(store=store)
    except SpotwarpError as error:
        yield Check("configuration", "fail", str(error), "correct it, then run doctor again", error.exit_code)
        return
    state = str(loaded.config_path) if loaded.config_found else f"{loaded.config_path} does not exist; defaults hold"
    yield Check("configuration", "ok", state)
    yield wiring.lease_check(Path.cwd())
    cache = disk_check(loaded)
    yield cache
    if save_bytes is not None and cache.outcome != "fail":
        yield wiring.save_check(cache_place(loaded), save_bytes)
    yield from mount_checks(loaded)
    yield from store_checks(loaded, write=write)
    if workspace is not None:
        yield from wiring.stale_locks(loaded, workspace)


def fuse_checks() -> Iterator[Check]:
    """Tell whether a FUSE mount can work here; its absence is a warning, since the directory form needs none."""
    remedy = "nothing has to be done: `spotwarp run` and `spotwarp start` serve a plain directory here"
    if sys.platform != "linux":
        yield Check("fuse", "warn", f"there is no FUSE mount on {sys.platform}; ls, cat, cp and push work", "")
        return
    if not os.path.exists("/dev/fuse"):
        yield Check("/dev/fuse", "warn", "does not exist", remedy)
    elif not os.access("/dev/fuse", os.R_OK | os.W_OK):
        yield Check("/dev/fuse", "warn", "may not be opened by this user", remedy)
    else:
        yield Check("/dev/fuse", "ok", "can be opened")
    helper = shutil.which("fusermount3")
    if helper:
        yield Check("fusermount3", "ok", helper)
    elif os.geteuid() == 0:
        yield Check("fusermount3", "warn", "is not installed; root can mount without", "apt-get install fuse3")
    else:
        yield Check("fusermount3", "warn", "is not installed", "apt-get install fuse3")
    try:
        version = getattr(importlib.import_module("pyfuse3"), "__version__", "of unknown version")
        yield Check("pyfuse3", "ok", str(version))
    except ImportError as error:
        yield Check("pyfuse3", "warn", f"cannot be imported: {error}", "pip install 'spotwarp[fuse]'")


def descriptor_check() -> Check:
    """Tell whether enough files may be open at a time."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS_MIN
    remedy = "" if enough else f"raise the limit: ulimit -n {DESCRIPTORS_MIN}"
    return Check("open files", "ok" if enough else "warn", f"{soft} at a time, can be raised to {hard}", remedy)


def cache_place(loaded: LoadedSettings) -> Path:
    """Return the directory in which the cache is, or is to be made."""
    wanted = loaded.settings.cache_dir or loaded.settings.state_dir
    return next(path for path in (wanted, *wanted.parents) if os.path.exists(path))


def disk_check(loaded: LoadedSettings) -> Check:
    """Tell whether the cache's disk has room for a cache and can be written."""
    from spotwarp_fs.cli.derived import cache_budget

    wanted = loaded.settings.cache_dir or loaded.settings.state_dir
    existing = cache_place(loaded)
    if not os.access(existing, os.W_OK):
        return Check("cache", "fail", f"{existing} cannot be written", "choose another --cache-dir", ExitCode.CACHE)
    free = shutil.disk_usage(existing).free
    try:
        budget = cache_budget(loaded.settings, free_bytes=free, cached_bytes=0)
    except SpotwarpError as error:
        return Check("cache", "fail", str(error), "", error.exit_code)
    detail = f"{wanted}: {format_size(free)} free, a new cache would use up to {format_size(budget)}"
    if budget > free:
        return Check("cache", "warn", detail, f"cache_size is more than the disk has: {format_size(free)}")
    return Check("cache", "ok", detail)


def mount_checks(loaded: LoadedSettings) -> Iterator[Check]:
    """Tell about each workspace mounted here: whether its daemon answers, and which lock files lie in it."""
    from spotwarp_fs.cli import client

    for record in client.current_records(loaded.settings.state_dir):
        name = f"mount {record.mountpoint}"
        try:
            client.call(record, "status", silence_max_s=5.0)
        except SpotwarpError as error:
            yield Check(name, "fail", str(error), f"spotwarp umount {record.mountpoint}", ExitCode.NOT_MOUNTED)
            continue
        locks = lock_files(Path(record.mountpoint))
        if locks:
            some = ", ".join(str(path.relative_to(record.mountpoint)) for path in locks[:5])
            remedy = "delete those whose program no longer runs: they came back with the workspace"
            yield Check(name, "warn", f"{record.workspace}; lock files: {some}", remedy)
        else:
            yield Check(name, "ok", record.workspace)


def lock_files(root: Path) -> list[Path]:
    """Find lock files that may be left from a node that died; looks at a limited number of directories."""
    found: list[Path] = []
    for count, (directory, _, names) in enumerate(os.walk(root)):
        if count == LOCK_DIRECTORIES_MAX:
            break
        here = Path(directory)
        found += [here / name for name in names if any((here / name).match(pattern) for pattern in LOCK_FILES)]
    return found


def store_checks(loaded: LoadedSettings, *, write: bool) -> Iterator[Check]:
    """Give the store's findings; a failure of the probe itself is one."""
    from spotwarp_fs.cli import wiring

    url = loaded.settings.store_url()
    try:
        yield from wiring.probe_store(loaded, write=write)
    except SpotwarpError as error:
        yield Check("store", "fail", f"{url}: {error}", "", error.exit_code)
    except OSError as error:
        yield Check("store", "fail", f"{url}: {error}", "", ExitCode.STORE_UNREACHABLE)
