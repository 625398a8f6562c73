"""Is a damaged map told from a good one, without dying of it, and are its bytes brought to safety before they go?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotwarp_fs.cli.map_loss import notices, settle_trust
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.datafiles import SparseDataFiles, data_path
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.mapcheck import damage_of, examine, fault_path, note_damage
from spotwarp_fs.local.rest import RestPlace, copy_sparse, rest_files

PAGE = 4096
ROWS = 5000
FOREVER_S = float("inf")


def make_map(path: Path) -> Path:
    """A map of several hundred pages, some of them free."""
    kv = LmdbKV(path)
    for part in range(10):
        with kv.write() as txn:
            for row in range(part, ROWS, 10):
                txn.put(b"%08d" % row, bytes(row % 200))
    with kv.write() as txn:
        for row in range(0, ROWS, 7):
            txn.delete(b"%08d" % row)
    kv.close()
    return path / "data.mdb"


def spoil_page(file: Path, page: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(page * PAGE)
        opened.write(random.Random(page).randbytes(PAGE))


def test_a_whole_map_is_left_alone_also_after_a_fault(tmp_path: Path) -> None:
    file = make_map(tmp_path)
    assert damage_of(tmp_path) is None
    fault_path(tmp_path).write_text("Fatal Python error: Segmentation fault")
    assert damage_of(tmp_path) is None, "something else killed that process"
    os.truncate(file, file.stat().st_size + PAGE)
    assert damage_of(tmp_path) is None, "a longer file is no damage"


def empty(file: Path) -> None:
    os.truncate(file, 0)


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zero_head_pages(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(2 * PAGE))


@pytest.mark.parametrize("damage", [empty, halve, zero_head_pages, Path.unlink])
def test_damage_to_the_file_as_a_whole_is_seen_at_every_start(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    file = make_map(tmp_path)
    damage(file)
    assert damage_of(tmp_path)


def test_spoiled_pages_are_found_by_a_check_that_follows_a_fault(tmp_path: Path) -> None:
    file = make_map(tmp_path)
    whole = file.read_bytes()
    found = 0
    for page in range(2, len(whole) // PAGE, 40):
        spoil_page(file, page)
        found += examine(tmp_path) is not None
        file.write_bytes(whole)
    assert found, "one of those pages is in use"
    for page in range(2, len(whole) // PAGE):
        spoil_page(file, page)
    fault_path(tmp_path).write_text("Fatal Python error: Bus error")
    assert damage_of(tmp_path)


def test_an_open_map_says_so_before_it_raises(tmp_path: Path) -> None:
    file = make_map(tmp_path)
    said: list[str] = []
    kv = LmdbKV(tmp_path, on_damage=said.append)
    for page in range(2, file.stat().st_size // PAGE):
        spoil_page(file, page)
    with pytest.raises(Corrupt, match="damaged"), kv.read() as view:
        list(view.scan(b""))
    snapshot = kv.snapshot()
    with pytest.raises(Corrupt, match="damaged"):
        snapshot.get(b"%08d" % 3000)
    snapshot.close()
    snapshot = kv.snapshot()
    with pytest.raises(Corrupt, match="damaged"):
        list(snapshot.scan(b""))
    snapshot.close()
    assert len(said) == 3
    kv.close()
    note_damage(tmp_path, said[0])
    assert damage_of(tmp_path) == said[0]


FAULT = """
import os, signal, sys
from pathlib import Path
from spotwarp_fs.cli.map_loss import open_map
from spotwarp_fs.local.cachedir import CacheDir

open_map(CacheDir.open(Path(sys.argv[1]), "store work"))
os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_a_process_that_dies_of_its_own_fault_leaves_word(tmp_path: Path) -> None:
    for number, told in ((signal.SIGBUS, True), (signal.SIGABRT, True), (signal.SIGKILL, False)):
        ended = subprocess.run([sys.executable, "-c", FAULT, tmp_path, str(int(number))], check=False)
        assert ended.returncode == -number
        assert (fault_path(tmp_path / "state" / "map").stat().st_size > 0) is told


def a_used_cache(path: Path) -> CacheDir:
    cache = CacheDir.open(path, "store work")
    cache.note_workspace_id("0f0f")
    make_map(cache.map_path)
    cache.certify_map()
    data = SparseDataFiles(cache.state)
    for block in range(3):
        data.pwrite(Inode(0x1001), block * BLOCK_BYTES, bytes([block + 1]) * BLOCK_BYTES)
    data.pwrite(Inode(0x1002), 0, b"whole")
    data.close()
    cache.journal_path.write_bytes(b"journal")
    return cache


def test_a_damaged_map_moves_alone_and_the_next_start_goes_on_where_this_one_was_killed(tmp_path: Path) -> None:
    cache = a_used_cache(tmp_path)
    assert settle_trust(cache) is None
    zero_head_pages(cache.map_path / "data.mdb")
    lost = settle_trust(cache)
    assert lost is not None
    place = cache.rest
    assert place is not None
    assert (place / "journal").read_bytes() == cache.journal_path.read_bytes() == b"journal"
    assert (place / "map" / "data.mdb").exists()
    assert not cache.map_trusted
    cache.close()

    again = CacheDir.open(tmp_path, "store work")
    make_map(again.map_path)
    lost = settle_trust(again)
    assert lost is not None, "the map that was half built is not believed, and the rest is still to be kept"
    assert again.rest == place
    assert again.salvages() == [place]
    make_map(again.map_path)
    again.certify_map()
    assert settle_trust(again) is None
    assert again.rest is None
    (notice,) = notices(again, "work")
    assert "damaged" in notice
    again.close()


def test_bytes_are_kept_but_for_what_is_proven_or_surely_published(tmp_path: Path) -> None:
    cache = a_used_cache(tmp_path)
    place = cache.set_map_aside("a test")
    rest = RestPlace(cache.state, place)
    parts, whole, old = Inode(0x1001), Inode(0x1002), Inode(0x1003)
    data = SparseDataFiles(cache.state)
    data.pwrite(old, 0, b"published")
    data.close()
    path = data_path(cache.state, old)
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1000))

    kept = [(ino, rest.keep(ino, proven, 60.0)) for ino, proven in (
        (parts, frozenset({BlockIndex(1)})), (whole, frozenset[BlockIndex]()), (old, frozenset[BlockIndex]()),
    )]  # fmt: skip
    assert [size > 0 for _, size in kept] == [True, True, False]
    assert rest.keep(old, frozenset(), FOREVER_S) > 0, "who does not know keeps everything"
    data = SparseDataFiles(cache.state)
    data.keep_only(parts, frozenset({BlockIndex(1)}))
    data.remove(whole)
    data.close()

    rest.tell("told", [(parts, kept[0][1], b"run/x\xff"), (whole, kept[1][1], None)])
    first, second = rest_files(place)
    assert (first.name, first.inode, second.name) == (b"run/x\xff", parts, None)
    copied = tmp_path / "copied"
    assert copy_sparse(first.path, copied) == 2 * BLOCK_BYTES
    assert copied.read_bytes() == b"\1" * BLOCK_BYTES + bytes(BLOCK_BYTES) + b"\3" * BLOCK_BYTES
    assert second.path.read_bytes() == b"whole"
    cache.close()
