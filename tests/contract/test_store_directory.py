"""The directory store under crashes and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import Denied, NotFound, PreconditionFailed, Unavailable
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.directory import PRIVATE, DirectoryStore
from spotwarp_fs.store.limits import TEMP_FILE_AGE_MAX_S

A = ObjectKey("manifests/00000001")


def temps(root: Path) -> list[str]:
    return [path.name for path in (root / PRIVATE).glob("*.tmp")]


@pytest.mark.history("M-m")
async def test_temp_files_of_a_kill_are_swept_when_they_are_old(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / PRIVATE).mkdir(parents=True)
    for name, age_s in (("old.tmp", TEMP_FILE_AGE_MAX_S + 60), ("young.tmp", 60.0)):
        (root / PRIVATE / name).write_bytes(b"half")
        then_s = time.time() - age_s
        os.utime(root / PRIVATE / name, (then_s, then_s))
    store = DirectoryStore(root)
    await store.put_if_absent(A, b"x")
    assert temps(root) == ["young.tmp"]
    assert [info.key async for info in store.list_objects("")] == [A]


async def test_nothing_is_left_beside_the_objects(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await store.put_if_absent(A, b"x")
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent(A, b"y")
    with pytest.raises(PreconditionFailed):
        await store.put_if_match(A, b"y", "stale")
    await store.put(A, b"z")
    assert temps(tmp_path) == []
    assert (tmp_path / A).read_bytes() == b"z"


CREATE = """
import sys, trio
from pathlib import Path
from spotwarp_fs.core.errors import PreconditionFailed
from spotwarp_fs.store.directory import DirectoryStore
async def main():
    store = DirectoryStore(Path(sys.argv[1]))
    sys.stdin.readline()
    for number in range(40):
        try:
            await store.put_if_absent(f"m/{number:03}", sys.argv[2].encode())
        except PreconditionFailed:
            pass
        else:
            print(number, flush=True)
trio.run(main)
"""


async def test_processes_never_both_create(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    won = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert sorted([*won[0], *won[1]], key=int) == [str(number) for number in range(40)]
    for name, numbers in zip(("one", "two"), won, strict=True):
        for number in numbers:
            assert (tmp_path / f"m/{int(number):03}").read_text() == name


async def test_a_store_that_was_there_and_is_gone_is_not_empty(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    fresh = DirectoryStore(root)
    with pytest.raises(NotFound):
        await fresh.get(A)
    await fresh.put(A, b"x")
    root.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="is it mounted"):
        await fresh.get(A)
    with pytest.raises(Unavailable, match="is it mounted"):
        await fresh.put_if_absent(ObjectKey("b"), b"x")
    with pytest.raises(Unavailable, match="is it mounted"):
        [info async for info in fresh.list_objects("")]
    with pytest.raises(Unavailable, match="is it mounted"):
        await fresh.delete([A])
    assert not root.exists()


async def test_listing_makes_no_directory(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "typo")
    assert [info async for info in store.list_objects("")] == []
    await store.delete([A])
    assert not (tmp_path / "typo").exists()


async def test_keys_sort_as_bytes_across_directories(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    names = ["a/x", "a-b", "a.c", "a0", "b/a/c", "b/a-c"]
    for name in names:
        await store.put(ObjectKey(name), b"")
    assert [info.key async for info in store.list_objects("")] == sorted(names)
    assert [info.key async for info in store.list_objects("b/a")] == ["b/a-c", "b/a/c"]


@pytest.mark.parametrize(("place", "kind"), [("/proc", Unavailable), ("/sys", Denied)])
async def test_a_place_that_takes_no_files_is_never_not_found(place: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await DirectoryStore(Path(place)).put_if_absent(A, b"x")


async def test_its_clock_is_given(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, now_ns=lambda: 5_000_000_000)
    assert (await store.put(A, b"x")).server_time_s == 5.0
