"""The file by which whoever rented this node permits a claim, and the files beside it that say how far the start is.

    FILE              written by the other side, whole or not at all: a writer epoch in decimal digits
    FILE.prefetched   written here: the newest state is loaded and followed; only the permit is missing
    FILE.claimed      this node's session holds the workspace
    FILE.first_read   a file's bytes were asked for (plain directory: names and small files are there)
    FILE.started      the command runs
    FILE.ended        it has ended; `saved`: everything is published

Invariant: each of these is one JSON object with `at_s`, replaced whole; nothing here depends on whether they can be
written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.types import ManifestNumber, WriterEpoch
from spotwarp_fs.engine.node_note import RentedNode
from spotwarp_fs.local.system import SystemWall

if TYPE_CHECKING:
    from spotwarp_fs.engine.session import Session

log = logging.getLogger(__name__)

NOTES: Final = ("prefetched", "claimed", "first_read", "started", "ended")
DIGITS_MAX: Final = 9


class PermitFile:
    """An `engine.permit.Permit` in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def granted(self) -> WriterEpoch | None:
        """Return the writer epoch that FILE names; None while it is absent or empty."""
        try:
            text = self._path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"the permit {self._path} cannot be read: {error.strerror}", ExitCode.CONFIG) from error
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX and int(text) > 0):
            raise UserError(
                f"the permit {self._path} says {text[:40]!r}, which is no writer epoch: 1, 2, 3 …", ExitCode.CONFIG
            )
        return WriterEpoch(int(text))

    def prefetched(self, number: ManifestNumber | None) -> None:
        """Say that the head is loaded."""
        self.note("prefetched", manifest=number)

    def claimed(self, session: Session) -> None:
        """Say that *session* holds the workspace, and later when it reads first."""
        head, resumed = session.publisher.head.manifest, session.claimed.resumed_from
        self.note(
            "claimed",
            manifest=head.number,
            writer_epoch=head.writer_epoch,
            resumed_from=None if resumed is None else resumed.number,
        )
        inner = session.files.on_read

        def first(*read: Any) -> None:
            session.files.on_read = inner
            self.note("first_read")
            if inner is not None:
                inner(*read)

        session.files.on_read = first

    def note(self, name: str, **facts: Any) -> None:
        """Leave one of the notes beside the file."""
        assert name in NOTES, name
        target = self._path.with_name(f"{self._path.name}.{name}")
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps({"at_s": SystemWall().now_ns() / 1e9, **facts}))
            draft.replace(target)
        except OSError as error:
            log.warning("not noted path=%s reason=%s", target, error)


def permit_of(wish: DaemonWish) -> PermitFile | None:
    """Return the permit that a daemon was told to wait for."""
    return None if wish.permit is None else PermitFile(Path(wish.permit))


def node_of(wish: DaemonWish) -> RentedNode | None:
    """Return the rented node that a daemon was told it runs on."""
    return None if wish.node_intent is None else RentedNode(wish.node_intent, wish.node_instance)


def note_claim(wish: DaemonWish, session: Session, ready: Callable[[Ready], None]) -> Callable[[Ready], None]:
    """Say beside the permit, if there is one, that *session* holds the workspace; gives what says that it is usable."""
    permit = permit_of(wish)
    if permit is None:
        return ready
    permit.claimed(session)

    def noted(report: Ready) -> None:
        if wish.form == "directory":
            permit.note("first_read")  # nobody sees reads of a plain directory: it counts as read from when it can be
        ready(report)

    return noted
