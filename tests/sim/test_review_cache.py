"""A start on a full disk, or one that is killed again, must not make a good cache worthless."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from spotwarp_fs.cli.derived import CACHE_BYTES_MIN, cache_budget
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.core.errors import UserError
from spotwarp_fs.fuse.supervisor import Supervised, write_record
from spotwarp_fs.local.cachedir import CacheDir


@pytest.mark.promise("P-01")
def test_a_restart_that_ends_while_it_certifies_its_map_does_not_take_the_belief_in_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A daemon is killed, with acknowledged writes in its map. 2. The next one certifies the map again: it empties
    the certificate, and is killed (or the disk is full) before it has written it. 3. The third throws the map away as
    one from another boot, and with it every write that was neither published nor fsynced."""
    cache = CacheDir.open(tmp_path / "cache", "s3://bucket w")
    cache.certify_map()
    assert cache.map_trusted

    def cut_short(path: Path, text: str) -> int:
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut_short)
    cache.certify_map()
    assert cache.map_trusted
    monkeypatch.undo()

    (cache.map_path / "trusted").write_text("another boot\n")
    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="No space"):
        cache.certify_map()
    assert (cache.map_path / "trusted").read_text() == "another boot\n"
    cache.close()


def test_a_supervisor_outlives_a_disk_that_takes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The disk of the cache is full. 2. The daemon dies, and is started again. 3. The supervisor cannot write down
    its pid, and must go on watching it all the same."""
    record = write_record(tmp_path / "supervisor.json")

    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    record(Supervised(1, 2, "/mnt", 3))
    assert "No space left" in caplog.text


@pytest.mark.promise("P-01")
def test_a_full_disk_refuses_a_new_cache_and_never_one_that_is_in_use() -> None:
    """1. Somebody else fills the disk. 2. The daemon is killed. 3. Its successor is told that a cache needs 16 MiB, and
    what was acknowledged stays out of reach until a person has noticed."""
    settings = Settings(store="s3://bucket", state_dir=Path("/state"))
    with pytest.raises(UserError, match="Free some space"):
        cache_budget(settings, free_bytes=0, cached_bytes=1 << 20)
    assert cache_budget(settings, free_bytes=0, cached_bytes=1 << 20, in_use=True) == CACHE_BYTES_MIN
