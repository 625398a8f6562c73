"""Careless versions of what the journal must be told, for worlds that lose power to find (see `plants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode
from spotwarp_fs.engine import delta, durability
from spotwarp_fs.engine.durability import Durability
from spotwarp_fs.engine.vouched import Vouched

_part, _between, _start, _holds_any = delta._part, delta.changes_between, Durability.start, Vouched.holds_any


def truncations_told_again(view: Any, after: ChangeSeq, upto: ChangeSeq) -> ChangeSet:
    """A: every record has all ranges dropped since the last publish."""
    return ChangeSet(_part(view, ChangeSeq(0), upto).drops, _part(view, after, upto).changes)


def start_at_the_head(self: Durability, published: ChangeSeq, sessions: Any) -> None:
    """B: a restarted session journals again what the last one had journalled."""
    _start(self, published, sessions)
    self._journaled = published


def coming_is_not_noted(self: Vouched, record: Changes) -> None:
    """C: what is on its way to the journal does not count yet."""
    self._coming_unknown = False


def one_part(view: Any, edges: Sequence[ChangeSeq], synced: Any) -> Changes:
    """D: what an open cut may publish is told together with what came later."""
    return _between(view, [edges[0], edges[-1]], synced)


def destroyed_at_once(self: Durability, ino: Inode, first: BlockIndex) -> bool:
    """E: a truncation or removal does not wait for the journal."""
    return True


PLANTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "truncations told again": [(delta, "_part", truncations_told_again)],
    "start at the head": [(Durability, "start", start_at_the_head)],
    "what is coming does not count": [(Vouched, "coming", coming_is_not_noted)],
    "a restart knows no claims": [(durability, "Vouched", lambda records=(): Vouched())],
    "no parts": [(durability, "changes_between", one_part)],
    "destroyed at once": [(Durability, "may_destroy", destroyed_at_once)],
    "evicted at once": [(Durability, "may_evict", destroyed_at_once)],
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, bug in PLANTS[name]:
            stack.enter_context(patch.object(owner, attribute, bug))
        yield
