"""Render a workspace's status for people: the risk first, in plain words, colour only where it means something.

Invariant: nothing is shown that is not in `core.status.Status`, and what is unknown is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from spotwarp_fs.cli.output import printable
from spotwarp_fs.core.status import Scanning, Status
from spotwarp_fs.core.units import format_duration, format_size

IN_FLIGHT_SHOWN: Final = 5
WARMING: Final = {
    "trace": "what was read after the last start",
    "small": "small files",
    "checkpoint": "the newest checkpoint",
    "rest": "everything else",
}
FORMS: Final = {"fuse": "fuse, a mount", "directory": "directory, a plain one that is scanned"}
Row = tuple[str, str, str]
"""Label, text, style."""


def view(status: Status, mountpoint: str) -> Group:
    """Return the status as something that rich prints."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text, style in rows(status):
        table.add_row(label, Text(printable(text), style=style))
    title = Text.assemble((status.workspace, "bold"), f" at {printable(mountpoint)} → {printable(status.store)}")
    return Group(title, table)


def rows(status: Status) -> Iterator[Row]:
    """Give the lines of the view."""
    yield from _alarms(status)
    yield "state", _state(status), ""
    yield "form", FORMS.get(status.form, status.form), ""
    if status.mode == "writer" and not status.fenced:
        yield _risk(status)
        yield from _drain(status)
        yield "checkpoint", _checkpoint(status), ""
        yield from _rates(status)
    if status.scanning is None:
        yield "cache", f"{format_size(status.cache_used_bytes)} of {format_size(status.cache_budget_bytes)}", ""
    else:
        yield from _scanning(status.scanning)
    yield from _hydration(status)
    yield from _in_flight(status)
    yield "since start", _totals(status), ""
    yield "daemon", f"pid {status.daemon_pid}, supervisor {status.supervisor_pid}, {format_size(status.rss_bytes)}", ""


def _scanning(scanning: Scanning) -> Iterator[Row]:
    """How a plain directory is looked at, and what cannot be told of it."""
    style = "" if scanning.watching == "intact" else "yellow"
    looked = f"watching is {scanning.watching}; {scanning.walks:,} walks, the last took "
    yield "scan", f"{looked}{format_duration(scanning.last_walk_s)}", style
    if scanning.reading:
        yield "reading", ", ".join(scanning.reading), ""
    if scanning.unsettled:
        yield "unsettled", f"changed while they were read, tried again: {', '.join(scanning.unsettled)}", "yellow"
    if scanning.fuzzy:
        yield "fuzzy", f"changing all the time, published as they were read: {', '.join(scanning.fuzzy)}", "yellow"


def _hydration(status: Status) -> Iterator[Row]:
    """What is on its way from the store: asked for, and fetched ahead."""
    if status.readers_waiting:
        yield "reads", f"{status.readers_waiting} wait for the store", ""
    coming = status.hydration
    if coming is None or coming.fetched_bytes >= coming.wanted_bytes:
        return
    how_far = f"{format_size(coming.fetched_bytes)} of {format_size(coming.wanted_bytes)}"
    files = f"{coming.fetched_files:,} of {coming.wanted_files:,} files"
    if coming.part:
        yield "fetching", f"{WARMING.get(coming.part, coming.part)}: {how_far}, {files}", ""
    else:
        yield "fetched", f"{how_far}, {files}; the rest comes when it is read", ""


def _in_flight(status: Status) -> Iterator[Row]:
    """What is being written as a whole; what lies in a directory that is listed goes without saying."""
    whole = {f"{item.path}/" for item in status.in_flight if item.kind == "directory"}
    outermost = [item for item in status.in_flight if not any(item.path.startswith(path) for path in whole)]
    for count, item in enumerate(outermost):
        label = "in flight" if count == 0 else ""
        if count == IN_FLIGHT_SHOWN:
            yield label, f"and {len(outermost) - count} more", ""
            break
        yield label, item.path + (" (torn: its writer died)" if item.torn else ""), "yellow" if item.torn else ""


def _totals(status: Status) -> str:
    totals = status.totals
    fetched = f"{format_size(totals.bytes_fetched)} fetched"
    if status.mode != "writer":
        return fetched
    sent = f"{format_size(totals.bytes_written)} written, {format_size(totals.bytes_uploaded)} sent, {fetched}"
    return f"{sent}, {totals.frames_deduplicated:,} frames not sent twice" if totals.frames_deduplicated else sent


def _alarms(status: Status) -> Iterator[Row]:
    if status.fenced:
        yield "FENCED", "another writer took this workspace over; see `spotwarp salvage list`", "bold red"
        if status.salvage:
            yield "salvage", status.salvage, ""
    elif status.read_only and status.mode == "writer":
        yield "READ-ONLY", "writes are refused", "bold red"
    for notice in status.notices:
        yield "NOTICE", notice, "bold yellow"
    if not status.store_reachable:
        yield (
            "STORE",
            f"not reachable: {status.store_error or 'no reason given'}; publishing resumes by itself",
            "bold red",
        )
    elif status.store_error and not status.fenced:
        yield "store", f"last error: {status.store_error}", "yellow"


def _state(status: Status) -> str:
    size = f"{format_size(status.logical_bytes)} in {status.files:,} files"
    published = f"manifest {status.head_number}, published {format_duration(status.head_age_s)} ago"
    if status.mode != "writer":
        return f"{published}, read-only, and does not change; {size}"
    return f"{published}; {size}"


def _risk(status: Status) -> Row:
    """What the loss of this node would cost now: what is sent and not published would be lost like the rest."""
    if status.dirty_bytes == 0 and status.rpo_seconds == 0:
        return "at risk", "nothing", "green"
    text = f"writes of the last {format_duration(status.rpo_seconds)}"
    if status.unpublished_bytes > status.dirty_bytes:
        text += f", {format_size(status.unpublished_bytes)}, {format_size(status.dirty_bytes)} of it still to send"
    elif status.dirty_bytes:
        text += f", {format_size(status.dirty_bytes)}"
    return "at risk", text, "yellow" if status.falling_behind or not status.store_reachable else ""


def _drain(status: Status) -> Iterator[Row]:
    """How long saving everything would take."""
    if not status.dirty_bytes:
        return
    if not status.store_reachable:
        yield "drain", "not before the store answers", "yellow"
    elif status.drain_eta_seconds is None:
        yield "drain", "takes a time not known yet: nothing was sent so far", ""
    else:
        yield "drain", f"takes {format_duration(status.drain_eta_seconds)}", ""


def _checkpoint(status: Status) -> str:
    safe = status.newest_safe_checkpoint
    if safe is None:
        return "the store has no complete one yet"
    return f"{safe.name}, {format_duration(safe.age_s)} old, in manifest {safe.manifest}"


def _rates(status: Status) -> Iterator[Row]:
    produced, sent = format_size(status.produced_bytes_per_s), format_size(status.sent_bytes_per_s)
    if status.falling_behind:
        yield "upload", f"falling behind: {produced}/s produced, {sent}/s sent", "bold yellow"
    else:
        yield "upload", f"{sent}/s sent, {produced}/s produced", ""
