"""Decide what a start on a plain directory may do with it (P-18): the wipe guard.

Invariant: an empty or foreign directory becomes the next state of a workspace that has one only by ADOPT, which the
user wished for; and nothing is laid out over a directory that may be ahead of the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import format_duration, format_size

NEWEST_NAMES: Final = 3
"""So many names of each side are shown."""


class Wish(Enum):
    """What the user typed."""

    PLAIN = "plain"
    RESTORE = "--restore"
    ADOPT = "--adopt-local"


class Step(Enum):
    """What the start does."""

    GO_ON = "go on"
    """The directory is this cache's own, or both are new: what differs are the user's changes."""
    LAY_OUT = "lay out"
    """The state's tree is laid out; what is there and different is moved aside."""
    ADOPT = "adopt"
    """What the directory holds becomes the next state."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What `.spotwarp/identity` says about the directory it lies in."""

    workspace_id: str
    name: str
    store: str
    created_ns: int
    token: str
    """Random; the cache that watches this directory has it too."""
    complete: bool = True
    """Not so while a state is being laid out: then a name that is missing was not deleted."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two things that could become the next state."""

    files: int
    """Everything but directories."""
    bytes: int
    age_s: float | None = None
    """Of a state: since it was cut; of a directory: since its newest change. None when there is nothing."""
    newest: tuple[str, ...] = ()
    placeholders: int = 0
    """Files whose bytes are in the store only."""

    @property
    def empty(self) -> bool:
        """There is nothing in it, or nothing but directories."""
        return not self.files

    def describe(self) -> str:
        """Say it in words."""
        if self.empty:
            return "empty"
        age = f", newest change {format_duration(self.age_s)} ago" if self.age_s is not None else ""
        names = f", newest: {', '.join(self.newest[:NEWEST_NAMES])}" if self.newest else ""
        absent = f", {self.placeholders:,} of them without their bytes" if self.placeholders else ""
        return f"{self.files:,} files{absent}, {format_size(self.bytes)}{age}{names}"


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the decision is made from."""

    directory: str
    workspace: str
    workspace_id: str
    local: Side
    state: Side | None
    """The state that the workspace has; None, or an empty one: there is nothing to lose."""
    state_number: int
    identity: Identity | None
    cache_token: str
    """Of the directory that this cache watched; empty in a fresh one."""

    @property
    def has_state(self) -> bool:
        """The workspace has something to lose."""
        return self.state is not None and not self.state.empty

    @property
    def is_ours(self) -> bool:
        """The directory belongs to this workspace."""
        return self.identity is not None and self.identity.workspace_id == self.workspace_id

    @property
    def is_known(self) -> bool:
        """This very cache watched this very directory: what differs was changed here."""
        return self.is_ours and self.identity is not None and self.identity.token == self.cache_token


def decide(found: Situation, wish: Wish) -> Step:
    """Say what a start may do, or raise UserError with both sides and what to type."""
    if found.identity is not None and not found.is_ours:
        return _of_another_workspace(found, found.identity, wish)
    if found.identity is not None and not found.identity.complete:
        return _unfinished(found, wish)
    if found.is_known and (not found.local.empty or not found.has_state):
        return Step.GO_ON
    if not found.has_state:
        return _first_state(found, wish)
    match wish:
        case Wish.RESTORE:
            return Step.LAY_OUT
        case Wish.ADOPT if found.is_known:
            return Step.GO_ON
        case Wish.ADOPT:
            return _adopt(found)
        case Wish.PLAIN:
            raise _would_wipe(found)


def _of_another_workspace(found: Situation, identity: Identity, wish: Wish) -> Step:
    if wish is Wish.ADOPT:
        return _adopt(found)
    raise UserError(
        f"{found.directory} belongs to workspace {identity.name} ({identity.workspace_id}, {identity.store}), not to "
        f"{found.workspace} ({found.workspace_id}); it holds {found.local.describe()}. Choose another directory, or "
        f"publish what it holds as {found.workspace} with --adopt-local",
        ExitCode.WOULD_WIPE,
    )


def _unfinished(found: Situation, wish: Wish) -> Step:
    if wish is not Wish.ADOPT:
        return Step.LAY_OUT
    raise UserError(
        f"a restore into {found.directory} was interrupted: it holds {found.local.describe()}, and manifest "
        f"{found.state_number} of {found.workspace} {_state(found)}. Finish the restore with --restore first",
        ExitCode.WOULD_WIPE,
    )


def _first_state(found: Situation, wish: Wish) -> Step:
    if wish is Wish.RESTORE and not found.local.empty:
        raise UserError(
            f"workspace {found.workspace} has no state to restore, and {found.directory} holds "
            f"{found.local.describe()}. Start without --restore: that becomes the first state",
            ExitCode.WOULD_WIPE,
        )
    return _adopt(found)


def _adopt(found: Situation) -> Step:
    if not found.local.placeholders:
        return Step.ADOPT
    raise UserError(
        f"{found.directory} holds {found.local.describe()}: they cannot become a state of {found.workspace}. Start it "
        "with --restore in an empty directory, and copy the files that are whole into that",
        ExitCode.WOULD_WIPE,
    )


def _would_wipe(found: Situation) -> UserError:
    what = "is empty" if found.local.empty else f"holds {found.local.describe()}"
    if found.is_known:
        why = "everything in it is gone"
    elif found.is_ours:
        why = "the cache that watched it is gone, so nobody knows which of them is newer"
    else:
        why = "it was not made from this workspace"
    return UserError(
        f"{found.directory} {what}; manifest {found.state_number} of workspace {found.workspace} {_state(found)}; "
        f"{why}. Type --restore to lay the state out in the directory (what is there and different is moved to "
        ".spotwarp/replaced), or --adopt-local to make the directory as it is the next state",
        ExitCode.WOULD_WIPE,
    )


def _state(found: Situation) -> str:
    return f"has {found.state.describe()}" if found.state is not None and found.has_state else "is empty"
