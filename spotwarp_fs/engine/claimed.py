"""What a start of a writer has won, and what of it is still to be done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.sections import Root
from spotwarp_fs.engine.publish import Publisher


@dataclass(slots=True)
class Claimed:
    """What a claim won."""

    publisher: Publisher
    base: FrameRef | None
    """Where block maps lie that are not loaded."""
    root: Root | None
    """The base's root; None when there is no base, or the store did not answer in time."""
    created: bool
    resumed_from: Manifest | None
    """The head that was found; None for a new workspace."""
    left_out: tuple[str, ...] = ()
    taken_over: bool = False
    """The cache was empty: all bytes are in the store only."""
    pending: Callable[[], Awaitable[None]] | None = None
    """The takeover still to be published: the store did not answer in time, and the cache serves its own state."""
