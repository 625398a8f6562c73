"""How soon a change wants to be cut, by where it is (S8, C18): it only triggers, a cut always takes everything.

Invariant: an inode's interval is found by path once and then remembered until a name changes, so that writing costs a
look into a dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spotwarp_fs.core import paths
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.types import ROOT_INODE, Inode

REMEMBERED_MAX = 100_000


class Intervals:
    """The intervals of the policies; without any, that of the engine's settings holds everywhere."""

    def __init__(self, policies: Policies, interval_s: float) -> None:
        self._policies = replace(policies, interval_s=interval_s)
        self.differ = bool(policies.intervals)
        """Not the same everywhere: only then does anybody need to ask."""
        self.longest_s = max([interval_s, *(seconds for _, seconds in policies.intervals)])
        self._known: dict[Inode, float] = {}

    def shortest(self, view: KVRead, changed: Iterable[Inode]) -> float:
        """Return within what time a change of the inodes *changed* wants to be cut.

        What has no name any more has nothing to say; its directory changed with it.
        """
        found = [self._of(view, ino) for ino in changed]
        return min((seconds for seconds in found if seconds is not None), default=self._policies.interval_s)

    def _of(self, view: KVRead, ino: Inode) -> float | None:
        known = self._known.get(ino)
        if known is None:
            known = self._by_path(view, ino)
            if known is not None:
                if len(self._known) >= REMEMBERED_MAX:
                    self._known.clear()
                self._known[ino] = known
        return known

    def _by_path(self, view: KVRead, ino: Inode) -> float | None:
        if ino == ROOT_INODE:
            return self._policies.interval_for(b"")
        above = ((paths.path_of(view, parent), name) for parent, name in paths.each_name(view, ino))
        found = [path + b"/" + name if path else name for path, name in above if path is not None]
        return min(map(self._policies.interval_for, found), default=None)

    def name_changed(self, ino: Inode, *, directory: bool) -> None:
        """An inode is called something else now; a directory takes everything below it along."""
        if directory:
            self._known.clear()
        else:
            self._known.pop(ino, None)
