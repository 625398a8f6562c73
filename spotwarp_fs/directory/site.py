"""Where a restore happens and what it works with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from spotwarp_fs.directory.applying import Applier
from spotwarp_fs.directory.drafts import Drafts
from spotwarp_fs.directory.limits import RestoreLimits
from spotwarp_fs.directory.placeholders import Placeholders
from spotwarp_fs.engine.session import Session


@dataclass(frozen=True, slots=True)
class Site:
    """One session's directory."""

    session: Session
    root: bytes
    drafts: Drafts
    applier: Applier
    placeholders: Placeholders | None
    """None: no leases here, so no placeholders."""
    session_id: str
    limits: RestoreLimits

    def free_bytes(self) -> int:
        """What may still be written below the root."""
        figures = os.statvfs(self.root)
        return figures.f_bavail * figures.f_frsize
