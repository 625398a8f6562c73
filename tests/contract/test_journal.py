"""Does every journal keep what `append` returned from, by `core.journal.JournalLog`?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes, Record, SessionBegun, Synced, decode_prefix, encode_record
from spotwarp_fs.core.types import ChangeSeq, Inode, WriterEpoch
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.memory import MemoryJournal

AnyJournal = Journal | MemoryJournal


def changes(seq: int) -> Changes:
    # As decoded: order and types of a change set are lists then.
    return Changes(ChangeSeq(seq), ChangeSet([], [(b"i%d" % seq, b"value")]))


def synced(seq: int) -> Synced:
    return Synced(ChangeSeq(seq), Inode(7))


class Kept:
    """A journal and how the next process finds it, with torn bytes behind."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path / "journal"
        self.journal: AnyJournal = Journal(self.path) if kind == "file" else MemoryJournal()

    def reopened(self, torn: bytes = b"") -> AnyJournal:
        if isinstance(self.journal, MemoryJournal):
            return self.journal.reopened(torn)
        self.journal.close()
        with self.path.open("ab") as file:
            file.write(torn)
        self.journal = Journal(self.path)
        return self.journal

    def fail_next_sync(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a dying disk does."""
        if isinstance(self.journal, MemoryJournal):
            self.journal.sync_error = True
            return
        real, left = os.fdatasync, [1]

        def fdatasync(fd: int) -> None:
            if left:
                left.pop()
                raise OSError(5, os.strerror(5))
            real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)


@pytest.fixture(params=["file", "memory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return Kept(tmp_path, request.param)


def test_an_empty_journal_has_no_records(kept: Kept) -> None:
    assert kept.journal.records() == []
    assert kept.journal.size_bytes == 0


def test_appended_records_are_read_back_by_the_next_process(kept: Kept) -> None:
    records: list[Record] = [SessionBegun("5e55", WriterEpoch(2)), changes(3), synced(3)]
    kept.journal.append(records[:1])
    kept.journal.append(records[1:])
    assert kept.journal.records() == records
    assert kept.reopened().records() == records
    assert kept.journal.size_bytes == sum(len(encode_record(record)) for record in records)


@pytest.mark.parametrize("torn", [b"S", encode_record(changes(9))[:-1], bytes(3000)])
def test_a_torn_tail_is_cut_off_and_the_journal_goes_on(kept: Kept, torn: bytes) -> None:
    kept.journal.append([changes(3)])
    again = kept.reopened(torn)
    assert again.records() == [changes(3)]
    again.append([changes(4)])
    assert again.records() == [changes(3), changes(4)]


def test_rewrite_replaces_everything(kept: Kept) -> None:
    kept.journal.append([changes(seq) for seq in range(1, 50)])
    kept.journal.rewrite([synced(50)])
    kept.journal.append([changes(51)])
    assert kept.journal.records() == [synced(50), changes(51)]
    assert kept.reopened().records() == [synced(50), changes(51)]


def test_prune_keeps_what_the_head_lacks_and_the_named_sessions(kept: Kept) -> None:
    sessions = [SessionBegun(name, WriterEpoch(2)) for name in ("old", "new")]
    kept.journal.append([*sessions, changes(3), synced(3), changes(5), synced(5)])
    kept.journal.prune(ChangeSeq(3), frozenset({"new"}))
    assert kept.reopened().records() == [sessions[1], changes(5), synced(5)]


@pytest.mark.history("H10")
def test_H10_after_a_failed_sync_nothing_is_acknowledged_until_a_rewrite(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.journal.append([changes(1)])
    kept.fail_next_sync(monkeypatch)
    with pytest.raises(OSError, match=r"Input/output|rewritten"):
        kept.journal.append([changes(2)])
    with pytest.raises(OSError, match="rewritten"):
        kept.journal.append([changes(3)])
    kept.journal.rewrite([changes(1), changes(3)])
    kept.journal.append([changes(4)])
    assert kept.reopened().records() == [changes(1), changes(3), changes(4)]


def test_file_an_interrupted_rewrite_leaves_the_old_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([changes(1)])
    journal.close()
    (tmp_path / "journal.new").write_bytes(b"half of the new one")
    again = Journal(tmp_path / "journal")
    assert again.records() == [changes(1)]
    assert sorted(os.listdir(tmp_path)) == ["journal"]
    again.close()


WRITER = """
import sys
from pathlib import Path
from spotwarp_fs.core.types import ChangeSeq, Inode
from spotwarp_fs.core.journal import Synced
from spotwarp_fs.local.journal import Journal

journal = Journal(Path(sys.argv[1]))
seq = 0
while True:
    seq += 1
    journal.append([Synced(ChangeSeq(seq), Inode(7))])
    if seq % 10 == 0:
        journal.rewrite([Synced(ChangeSeq(seq), Inode(7))])
    sys.stdout.write(f"{seq}\\n")
    sys.stdout.flush()
"""


@pytest.mark.promise("P-02")
@pytest.mark.parametrize("kill_after", [1, 9, 10, 64])
def test_file_sigkill_between_appends_and_rewrites_loses_nothing_acknowledged(tmp_path: Path, kill_after: int) -> None:
    path = tmp_path / "journal"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = 0
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged == kill_after:
                os.kill(child.pid, signal.SIGKILL)
    journal = Journal(path)
    found = [record.seq for record in journal.records() if isinstance(record, Synced)]
    assert found[-1] in (acknowledged, acknowledged + 1)
    assert found == list(range(found[0], found[-1] + 1))
    assert found[0] == 1 or found[0] % 10 == 0
    journal.close()


def test_file_bytes_on_disk_are_the_documented_records(tmp_path: Path) -> None:
    open_journal: Callable[[], Journal] = lambda: Journal(tmp_path / "journal")  # noqa: E731
    journal = open_journal()
    journal.append([changes(1), synced(1)])
    stream = (tmp_path / "journal").read_bytes()
    assert decode_prefix(stream) == ([changes(1), synced(1)], len(stream))
    journal.close()
