"""What a start makes of the map that it finds: believe it, build it anew, or set it aside as damaged.

Invariant: a map is thrown away only when another boot made it or it was never complete; a damaged one is set aside with
what only it vouched for, so no start fails twice for the same damage.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from typing import IO

from spotwarp_fs.engine.recover import LostMap
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.mapcheck import damage_of, fault_path, note_damage
from spotwarp_fs.local.rest import RestPlace, is_rest

log = logging.getLogger(__name__)

_fault_log: list[IO[str]] = []


def settle_trust(cache: CacheDir) -> LostMap | None:
    """Leave a map that may be believed, or an empty one; gives what is to be known of a damaged one.

    Data files without any state to vouch for them are never served.
    """
    if cache.workspace_id is None:
        cache.clear()
        return None
    reason = "a start before this one found it so"
    if cache.map_trusted:
        damage = damage_of(cache.map_path)
        if damage is None:
            cache.end_rest()
            return None
        reason = damage
        log.error("the map is damaged (%s): it is set aside and built anew from head and journal", damage)
        cache.set_map_aside(damage)
    elif cache.rest is None:
        log.warning("the map is from another boot, or was never complete: it is built anew from head and journal")
        cache.discard_map()
        return None
    else:
        cache.discard_map()
    assert cache.rest is not None
    return LostMap(reason, RestPlace(cache.state, cache.rest))


def open_map(cache: CacheDir) -> LmdbKV:
    """Open the map to be served; if it turns out damaged, or kills this process, the next start finds word of it.

    Nothing that such a map says can be believed, so the process ends at once: the supervisor starts the next one, which
    sets the map aside. To go on would be to answer EIO for ever; and an end by a signal is one that is always followed
    by another start.
    """

    def end(reason: str) -> None:
        note_damage(cache.map_path, reason)
        log.critical("the map is damaged (%s): this daemon ends, the next one builds the map anew", reason)
        logging.shutdown()
        os.kill(os.getpid(), signal.SIGKILL)

    kv = LmdbKV(cache.map_path, on_damage=end)
    faults = open(fault_path(cache.map_path), "w")  # noqa: SIM115 (open for as long as the process lives)
    faulthandler.enable(faults, all_threads=False)
    for earlier in _fault_log:
        earlier.close()
    _fault_log[:] = [faults]
    return kv


def notices(cache: CacheDir, workspace: str) -> tuple[str, ...]:
    """Tell of each damaged map whose salvage was not dropped yet."""
    found = []
    for place in cache.salvages():
        if is_rest(place):
            said = (place / "reason").read_text(encoding="utf-8", errors="replace").strip()
            found.append(f"{said}. Once you have what you need: `spotwarp salvage drop {workspace}/{place.name}`")
    return tuple(found)
