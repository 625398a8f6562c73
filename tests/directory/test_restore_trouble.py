"""What comes of a restore when the store is damaged or away, the disk is full, or this user may not do everything?"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.ports import Lane, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory import applying
from spotwarp_fs.directory.site import Site
from spotwarp_fs.store.memory import MemoryStore
from tests.directory.test_restore import EVERYTHING, published
from tests.support.laid_out import READ, SETTINGS, MiB, all_filled, compare, filling, in_another_process, opened
from tests.support.slow_store import SlowStore


class FlippingStore(SlowStore):
    """Flips a bit in what is read of one frame, always."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, latency_s=0.0, bytes_per_s=1e12)
        self.flipped: tuple[str, int] | None = None

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        found = await super().get(key, start=start, length=length, lane=lane)
        if self.flipped is None or not key.endswith(self.flipped[0]):
            return found
        at = self.flipped[1] - start
        if not 0 <= at < len(found.body):
            return found
        return replace(found, body=found.body[:at] + bytes([found.body[at] ^ 1]) + found.body[at + 1 :])


def frame_of(restored: object, path: bytes, block: int = 0) -> tuple[str, int]:
    from spotwarp_fs.engine.through import items_of

    session = restored.session  # type: ignore[attr-defined]
    with session.workspace.kv.read() as view:
        item = items_of(view, restored.inode(path))[block]  # type: ignore[attr-defined]
    return item.frame.pack, item.frame.offset + item.frame.stored_bytes // 2


@pytest.mark.promise("P-08")
async def test_a_flipped_bit_leaves_a_placeholder_and_never_wrong_bytes(tmp_path: Path) -> None:
    store, expected = await published()
    flipping = FlippingStore(store)
    async with opened(flipping, tmp_path / "w", settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        ino = restored.inode(b"a/big.dat")
        await restored.session.files.load_map(ino)
        flipping.flipped = frame_of(restored, b"a/big.dat", block=3)
        async with filling(restored):
            await all_filled(restored, but=1)
            assert not await restored.restorer.filler.fill(ino)
            assert list(restored.restorer.filler.damaged) == [ino]
            assert "digest" in restored.restorer.filler.damaged[ino] or "frame" in restored.restorer.filler.damaged[ino]
            assert restored.seen(b"a/big.dat") is Seen.ABSENT
            assert ino in restored.leases.held
            assert restored.restorer.filler.progress().damaged == 1
            assert any("a/big.dat" in line for line in restored.session.workspace.reports)
            flipping.flipped = None
            assert await in_another_process(READ, restored.root / "a/big.dat") == expected[b"a/big.dat"]
        compare(restored, expected)


@pytest.mark.promise("P-08")
@pytest.mark.parametrize("path", [b"lib/module7.py", b"a/big.dat"])
async def test_what_is_damaged_and_cannot_wait_cannot_be_opened(tmp_path: Path, path: bytes) -> None:
    store, expected = await published()
    flipping = FlippingStore(store)
    async with opened(flipping, tmp_path / "before") as restored:
        await restored.session.files.load_map(restored.inode(path))
        flipping.flipped = frame_of(restored, path)
    async with opened(flipping, tmp_path / "w", why_no_leases="none here") as restored:
        report = await restored.restorer.lay_out()
        assert list(report.damaged) == [os.fsdecode(path)]
        with pytest.raises(FileNotFoundError):
            os.open(restored.root / os.fsdecode(path), os.O_RDWR | os.O_CREAT)
        assert (restored.root / "lib/module8.py").read_bytes() == expected[b"lib/module8.py"]
        assert restored.seen(path) is Seen.ABSENT
        flipping.flipped = None
        assert await restored.restorer.filler.fill(restored.inode(path))
        compare(restored, expected)


@pytest.mark.promise("P-09")
async def test_an_outage_pauses_and_nothing_is_lost(tmp_path: Path) -> None:
    inner, expected = await published()
    store = SlowStore(inner, latency_s=0.001, bytes_per_s=1e9)
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        store.away = True
        async with filling(restored), trio.open_nursery() as nursery:
            found: list[bytes] = []

            async def read() -> None:
                found.append(await in_another_process(READ, restored.root / "b/tool"))

            nursery.start_soon(read)
            with trio.fail_after(30):
                while not restored.restorer.filler.progress().waiting:
                    await trio.sleep(0.01)
            await trio.sleep(0.3)
            assert not found
            assert len(restored.restorer.filler.absent) == 6
            store.away = False
            await all_filled(restored)
        assert found == [expected[b"b/tool"]]
        compare(restored, expected)


async def test_demand_overtakes_the_background(tmp_path: Path) -> None:
    inner, _ = await published()
    store = SlowStore(inner, latency_s=0.01, bytes_per_s=4e6)
    settings = replace(EVERYTHING, through_bytes_max=4 * MiB)
    async with opened(store, tmp_path / "w", settings=settings) as restored:
        await restored.restorer.lay_out()
        async with filling(restored):
            await trio.sleep(0.1)
            assert restored.restorer.filler.progress().part != ""
            await in_another_process(READ, restored.root / "b/tool")
            assert len(restored.restorer.filler.absent) >= 3


async def test_memory_is_bounded_however_much_is_filled(tmp_path: Path) -> None:
    inner, _ = await published()
    store = SlowStore(inner, latency_s=0.01, bytes_per_s=1e9)
    settings = replace(EVERYTHING, through_bytes_max=16 * MiB)
    async with opened(store, tmp_path / "w", settings=settings) as restored:
        await restored.restorer.lay_out()
        store.forget()
        async with filling(restored):
            await all_filled(restored)
        assert 1 < store.in_flight_max <= 3  # three quarters of the places: runs of 2 MiB, each twice in memory


async def test_what_this_user_cannot_apply_is_said_and_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = await published()
    chown = os.chown

    def refused(place: object, uid: int, gid: int, **options: bool) -> None:
        if (uid, gid) == (1234, 4321):
            raise PermissionError(1, "Operation not permitted")
        chown(place, uid, gid, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(applying.os, "chown", refused)
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        report = await restored.restorer.lay_out()
        assert report.left_out == {"owners (Operation not permitted)": 1}
        async with filling(restored):
            await all_filled(restored)
        from spotwarp_fs.core import paths
        from spotwarp_fs.core.witness import merged
        from spotwarp_fs.directory.witnessing import witness_of

        ino = restored.inode(b"a/big.dat")
        with restored.session.workspace.kv.read() as view:
            record, witness = paths.inode(view, ino), witness_of(view, ino)
        status = os.lstat(restored.root / "a/big.dat")
        assert (status.st_uid, status.st_gid) != (1234, 4321)
        assert merged(record, witness, status) == record


async def test_an_ordinary_user_gets_no_set_user_id_bits_of_others(tmp_path: Path) -> None:
    applier = applying.Applier(owners=False)
    place = os.fsencode(tmp_path / "tool")
    Path(os.fsdecode(place)).write_bytes(b"")
    from spotwarp_fs.core.records import InodeRecord

    applier.finish(place, InodeRecord(stat.S_IFREG | 0o4755, 1, 0, 0, 0), [])
    assert stat.S_IMODE(os.lstat(place).st_mode) == 0o755


async def test_what_has_no_room_on_this_disk_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, expected = await published()
    monkeypatch.setattr(Site, "free_bytes", lambda site: 4 * MiB)
    async with opened(store, tmp_path / "w", why_no_leases="none here") as restored:
        report = await restored.restorer.lay_out()
        assert (restored.root / "a/big.dat").is_symlink()
        assert report.links == 1
        assert any("a/big.dat" in line and "no room" in line for line in report.said)
        assert (restored.root / "b/tool").read_bytes() == expected[b"b/tool"]


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await published()

    def full(path: object, mode: int = 0o777, **options: object) -> None:
        raise OSError(28, "No space left on device", os.fspath(path))  # type: ignore[call-overload]

    async with opened(store, tmp_path / "w") as restored:
        monkeypatch.setattr("spotwarp_fs.directory.drafts.os.mkdir", full)
        with pytest.raises(UserError, match=r"No space left.*next start goes on"):
            await restored.restorer.lay_out()


async def test_many_small_files_come_in_few_requests(tmp_path: Path) -> None:
    from tests.support.laid_out import Maker, noise, publish

    async def make(session: object) -> None:
        made = Maker(session)  # type: ignore[arg-type]
        for at in range(600):
            await made.file(b"env/lib%d/module%d.py" % (at % 10, at), noise(at, 4000))

    inner = MemoryStore()
    await publish(inner, make)
    store = SlowStore(inner, latency_s=0.001, bytes_per_s=1e9)
    async with opened(store, tmp_path / "w", settings=replace(SETTINGS, hydrate_run_blocks=8)) as restored:
        store.forget()
        report = await restored.restorer.lay_out()
        assert report.filled == 600
        asked = Counter(get.key for get in store.data_gets)
        assert set(asked.values()) == {1}, asked
        assert len(asked) <= 10
