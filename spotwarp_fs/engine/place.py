"""Where a workspace was mounted: absolute paths in it (virtual environments, a trainer's state) lead nowhere else.

Invariant: this is told to people; nothing is decided by it.
"""

from __future__ import annotations

from spotwarp_fs.core.manifests import Manifest

NOTE = "mountpoint"
"""Name of the manifest's note."""


def note_of(mountpoint: str) -> dict[str, str]:
    """Name the mountpoint of this session, for a manifest's notes; a tool that mounts nothing has none."""
    return {NOTE: mountpoint} if mountpoint.startswith("/") else {}


def carried(manifest: Manifest) -> dict[str, str]:
    """The note of *manifest* for its successor by a start that has published nothing of its own yet."""
    found = manifest.notes.get(NOTE)
    return {NOTE: found} if isinstance(found, str) else {}


def moved(found: Manifest | None, mountpoint: str) -> tuple[str, ...]:
    """Warn that the state that was taken over was made below another path, in a line."""
    before = carried(found).get(NOTE) if found is not None else None
    if before is None or before == mountpoint:
        return ()
    return (
        f"this state was mounted at {before} before, now at {mountpoint}: absolute paths in it (virtual environments, "
        f"links, checkpoint paths in trainer_state.json) still lead to {before}; mount it there if programs miss files",
    )
