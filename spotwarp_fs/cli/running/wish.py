"""What `spotwarp run` was asked for.

Invariant: paths are absolute, and seen from the directory in which `run` was typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class RunWish:
    """A command and the workspace around it."""

    command: tuple[str, ...]
    script: str | None
    """A file to run with this Python; the command is its arguments then."""
    typed_in: Path
    """Where `run` was typed."""
    workspace: Path
    checkpoint_path: Path
    """Where the command keeps its checkpoints, inside the workspace."""
    takeover: bool = False
    wait: bool = True
    local_files: Literal["restore", "adopt"] | None = None
    """What becomes of files that are in the directory already, when the workspace has a state."""
    permit: Path | None = None
    """A file that will say which writer epoch may be claimed (`cli.permit_file`)."""
    node_intent: str | None = None
    """The rented node that this is, for the notes of manifests."""
    node_instance: str = ""
