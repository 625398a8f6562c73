"""Tell what a takeover serves and what it left out: in its manifest, and to people.

Invariant: counts are whole; of paths at most NAMED_MAX of a kind are named, so that a manifest stays small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spotwarp_fs.core import retention
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.replacement import LeftOut
from spotwarp_fs.core.takeover import GoBack, Serve
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.publish import Head

NAMED_MAX = 50


@dataclass(slots=True)
class Draft:
    """A served state in the making."""

    number: ManifestNumber
    parts: list[ChangeSet]
    left_out: list[LeftOut]
    put_back: tuple[tuple[bytes, ManifestNumber], ...] = ()
    missing: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()


def lines_of(content: Head, serve: Serve, draft: Draft, seconds: float, workspace: str) -> tuple[str, ...]:
    """Say what is not served as the head has it, each with the command that fetches it."""
    lines = []
    if isinstance(serve, GoBack):
        lines.append(
            f"the workspace went back {seconds:.0f} s, from manifest {content.manifest.number} to {draft.number}, "
            f"when nothing was being written; {len(draft.lost)} files lost changes"
        )
    for item in draft.left_out[:NAMED_MAX]:
        instead = f"as it was in manifest {item.source}" if item.source is not None else "not at all"
        half = "torn" if item.torn else "half written"
        lines.append(f"{_text(item.path)} was {half}; it is here {instead}. To get it: {item.hint(workspace)}")
    lines += [f"{_text(path)} is back from manifest {number}" for path, number in draft.put_back]
    lines += [f"no complete {_text(kind)} was ever published" for kind in draft.missing]
    return tuple(lines)


def outermost(items: Iterable[InFlightItem]) -> list[InFlightItem]:
    """Leave out what lies in a directory that is half done as a whole."""
    every = list(items)
    directories = [item.path for item in every if item.kind == "directory"]
    return [i for i in every if not any(d != i.path and retention.within(i.path, d) for d in directories)]


def report_of(content: Head, draft: Draft, seconds: float) -> dict[str, Any]:
    """What the takeover manifest says about itself."""
    return {
        "from_number": content.manifest.number,
        "from_session": content.manifest.session,
        "served": draft.number,
        "seconds_lost": seconds,
        "left_out": [
            {"path": _text(item.path), "at": item.at, "source": item.source, "torn": item.torn}
            for item in draft.left_out[:NAMED_MAX]
        ],
        "left_out_count": len(draft.left_out),
        "put_back": [[_text(path), number] for path, number in draft.put_back[:NAMED_MAX]],
        "missing": [_text(kind) for kind in draft.missing[:NAMED_MAX]],
        "lost_files": [_text(path) for path in draft.lost[:NAMED_MAX]],
        "lost_files_count": len(draft.lost),
    }


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
