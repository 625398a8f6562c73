"""Is each decision about a real file's `stat` right?"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.witness import SETTLED_AFTER_NS, Look, Seen, Witness, is_settled, look, merged

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
WITNESSES = st.builds(
    Witness, U64, U64, U32, U32, U32, U32, U64, U64, I64, I64, st.integers(0, 15).map(Seen), st.integers(0, 255)
)
RECORD = InodeRecord(0o100600, 1, 7, 8, 100, mtime_ns=5, ctime_ns=6)


def stat_of(path: Any, **changes: int) -> os.stat_result:
    """A real `stat`, with some of it changed."""
    found = os.stat(path)
    fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")} | changes
    return _Stat(fields)  # type: ignore[return-value]


class _Stat:
    def __init__(self, fields: dict[str, int]) -> None:
        self.__dict__.update(fields)


@given(WITNESSES)
def test_a_witness_comes_back_as_it_was(witness: Witness) -> None:
    assert Witness.decode(witness.encode()) == witness


def test_a_trusted_unchanged_file_is_clean_and_everything_else_is_read(tmp_path: Any) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    status = os.stat(path)
    trusted = Witness.of(status, Seen.TRUSTED)
    assert look(trusted, status) is Look.CLEAN
    assert look(None, status) is Look.READ
    assert look(trusted.with_seen(Seen.NOTHING), status) is Look.READ
    for change in ("st_ino", "st_dev", "st_size", "st_mtime_ns", "st_ctime_ns", "st_mode"):
        assert look(trusted, stat_of(path, **{change: getattr(status, change) + 1})) is Look.READ, change


@pytest.mark.history("C19")
def test_C19_a_placeholder_is_never_read_whatever_its_stat_says(tmp_path: Any) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    status = os.stat(path)
    for seen in (Seen.ABSENT, Seen.LATE, Seen.ABSENT | Seen.TRUSTED):
        absent = Witness.of(status, seen)
        assert look(absent, status) is Look.ABSENT
        assert look(absent, stat_of(path, st_mtime_ns=1, st_ctime_ns=2)) is Look.ABSENT
        assert look(absent, stat_of(path, st_size=status.st_size + 1)) is Look.WRITTEN
        assert look(absent, stat_of(path, st_ino=status.st_ino + 1)) is Look.WRITTEN


def test_a_change_must_be_old_enough_and_not_in_the_future(tmp_path: Any) -> None:
    status = stat_of(tmp_path, st_ctime_ns=10 * SETTLED_AFTER_NS)
    assert not is_settled(status, 11 * SETTLED_AFTER_NS - 1)
    assert is_settled(status, 11 * SETTLED_AFTER_NS)
    assert not is_settled(status, 9 * SETTLED_AFTER_NS)


@pytest.mark.history("M-i")
@pytest.mark.promise("P-11")
def test_what_was_not_changed_here_keeps_the_value_of_the_workspace(tmp_path: Any) -> None:
    """An ordinary user cannot give files to uid 7, nor set a ctime: the record must not learn that from the disk."""
    here = Witness.of(os.stat(tmp_path))
    assert merged(RECORD, here, os.stat(tmp_path)) == RECORD
    moved = stat_of(tmp_path, st_ctime_ns=here.ctime_ns + 9)
    assert merged(RECORD, here, moved) == RECORD, "a ctime alone is no change"
    status = stat_of(tmp_path, st_mode=0o100640, st_ctime_ns=99)
    assert merged(RECORD, here, status) == replace(RECORD, mode=0o100640, ctime_ns=99)
    status = stat_of(tmp_path, st_uid=4, st_mtime_ns=77, st_ctime_ns=99)
    assert merged(RECORD, here, status) == replace(RECORD, uid=4, mtime_ns=77, ctime_ns=99)


@pytest.mark.promise("P-11")
def test_the_time_at_which_a_placeholder_is_being_filled_is_not_its_own(tmp_path: Any) -> None:
    here = Witness.of(os.stat(tmp_path), Seen.ABSENT)
    filling = stat_of(tmp_path, st_mtime_ns=here.mtime_ns + 5, st_ctime_ns=here.ctime_ns + 5)
    assert merged(RECORD, here, filling) == RECORD
    assert here.seen_again(filling, Seen.ABSENT).mtime_ns == here.mtime_ns
    assert merged(RECORD, here, stat_of(tmp_path, st_mode=0o100640)).mode == 0o100640


def test_a_file_of_this_node_shows_as_it_is(tmp_path: Any) -> None:
    status = os.stat(tmp_path)
    found = merged(RECORD, None, status)
    assert (found.mode, found.uid, found.mtime_ns, found.ctime_ns) == (
        status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns,
    )  # fmt: skip
    assert found.size == RECORD.size
