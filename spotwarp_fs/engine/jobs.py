"""What is on its way through the sealing pipeline: blocks of files, bytes that were offered, and the pack they fill.

Invariant: an offer that was answered holds its pack until `Sealer.let_go`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import BlockIndex, Generation, Inode
from spotwarp_fs.engine.cut import Cut


@dataclass(slots=True)
class Offer:
    """A block's bytes that the map does not have yet, on their way to a frame (see `Sealer.offer`)."""

    raw: bytes
    name: bytes
    """Their digest."""
    frame: FrameRef | None = None
    """In the store, and safe from collection until `Sealer.let_go`; None after `done`: it was given up."""
    placed: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    dropped: bool = False
    """Nobody waits for it any more."""


@dataclass(slots=True)
class Job:
    """One block on its way to a frame."""

    ino: Inode
    block: BlockIndex
    cut: Cut | None
    turn: trio.Event
    """Set when the job submitted before this one has its place in a pack, or needs none."""
    generation: Generation | None = None
    """The live block's generation that the bytes belong to; None when they came from the cut's spool."""
    offer: Offer | None = None
    """The bytes were handed over: they belong to no block of the map yet."""
    placed: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class OpenPack:
    """The pack being filled, and who waits for each digest in it."""

    builder: PackBuilder
    jobs: dict[bytes, list[Job]] = field(default_factory=dict)
    opened_s: float = 0.0
