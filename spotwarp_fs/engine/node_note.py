"""Which rented node writes: a note in every manifest of its session, from the takeover on.

Invariant: the note stands in each manifest of a session that such a node began, and in none of any other session. The
engine decides nothing by it; whoever rents the nodes reads there who holds the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotwarp_fs.core.manifests import Manifest

NOTE: Final = "node"
"""Name of the manifest's note."""


@dataclass(frozen=True, slots=True)
class RentedNode:
    """A node, as whoever rented it names it."""

    intent: str
    instance: str
    """As its provider names it; empty where nobody told."""


def note_of(node: RentedNode | None) -> dict[str, Any]:
    """Name the node of this session, for a manifest's notes."""
    return {} if node is None else {NOTE: {"intent": node.intent, "instance": node.instance}}


def node_of(manifest: Manifest) -> dict[str, str]:
    """Read the note; empty when there is none, or none that makes sense."""
    found = manifest.notes.get(NOTE)
    if not isinstance(found, Mapping):
        return {}
    return {name: str(value) for name, value in found.items() if isinstance(value, str)}
