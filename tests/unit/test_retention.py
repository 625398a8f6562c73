from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core import retention
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.records import RETENTION_TABLE, SNAPSHOT_TABLE, encode_u64
from spotwarp_fs.core.retention import Reason
from spotwarp_fs.core.types import Inode, ManifestNumber
from tests.support.inflight_worlds import DictView


@dataclass(frozen=True)
class Facts:
    number: ManifestNumber
    created_s: float = 0.0
    in_flight: tuple[InFlightItem, ...] = ()
    barrier: bool = False

    @property
    def quiescent(self) -> bool:
        return all(item.torn for item in self.in_flight)


@dataclass(frozen=True)
class Size:
    files: int
    logical_bytes: int


def item(path: str, *, torn: bool = False) -> InFlightItem:
    return InFlightItem(Inode(7), path.encode(), "file", torn)


def state(number: int, *items: InFlightItem, created_s: float | None = None) -> Facts:
    return Facts(ManifestNumber(number), float(number if created_s is None else created_s), items)


def numbers(*values: int) -> set[ManifestNumber]:
    return {ManifestNumber(value) for value in values}


def test_head_quiescent_last_hour_named_pinned_and_read_states_stay() -> None:
    states = [state(n, *([item("a.pt")] if n > 60 else []), created_s=n * 60) for n in range(1, 201)]
    keep = retention.retained(
        states,
        200 * 60,
        named=numbers(3),
        pins={ManifestNumber(5): 200 * 60 + 1, ManifestNumber(6): 200 * 60},
        readers=numbers(9),
    )
    assert set(keep) == numbers(3, 5, 9, 60, *range(140, 201))
    assert keep[ManifestNumber(60)] == {Reason.QUIESCENT, Reason.SOURCE}
    assert Reason.HEAD in keep[ManifestNumber(200)]


@pytest.mark.history("L8")
def test_L8_the_last_complete_version_of_a_torn_thing_stays() -> None:
    torn = item("last.ckpt", torn=True)
    states = [state(1), state(2, item("last.ckpt")), state(3, torn), state(4, torn), state(5, torn, item("b/x.pt"))]
    keep = retention.retained(states, 1e6)
    assert set(keep) == numbers(1, 4, 5)
    assert keep[ManifestNumber(1)] == {Reason.SOURCE}
    assert keep[ManifestNumber(4)] == {Reason.QUIESCENT, Reason.SOURCE}


def test_a_state_in_which_the_directory_around_it_was_half_done_is_no_source() -> None:
    states = [state(1), state(2, item("ck/a.pt")), state(3, item("ck"))]
    assert retention.source_of(b"ck/b.pt", states, upto=ManifestNumber(3)) == 2
    assert retention.source_of(b"ck", states, upto=ManifestNumber(3)) == 1
    assert retention.source_of(b"ck-2", states, upto=ManifestNumber(3)) == 3


histories = st.lists(
    st.tuples(st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("de"))), min_size=1, max_size=25
)


@given(histories, st.integers(1, 2000))
def test_what_was_once_let_go_is_never_asked_for_again(steps: list[tuple[set[str], set[str]]], step_s: int) -> None:
    """And knowing only what was retained before gives the same answer as knowing everything."""
    everything: list[Facts] = []
    known: list[Facts] = []
    let_go: set[ManifestNumber] = set()
    for number, (open_names, torn_names) in enumerate(steps, 1):
        items = [item(name) for name in open_names] + [item(name, torn=True) for name in torn_names]
        fresh = state(number, *items, created_s=number * step_s)
        everything.append(fresh)
        known.append(fresh)
        keep = set(retention.retained(known, number * step_s))
        assert keep == set(retention.retained(everything, number * step_s))
        assert not keep & let_go
        let_go |= {s.number for s in everything} - keep
        known = [s for s in known if s.number in keep]


@pytest.mark.promise("P-18")
@pytest.mark.parametrize(
    ("before", "after", "wipes"),
    [
        (Size(1, 10), Size(0, 0), True),
        (Size(0, 0), Size(0, 0), False),
        (Size(100, 10**9), Size(49, 10**9), True),
        (Size(100, 10**9), Size(50, 10**9), False),
        (Size(100, 10**9), Size(100, 10**9 // 2 - 1), True),
        (Size(100, 10**9), Size(100, 10**9 // 2), False),
        (Size(5, 900), Size(2, 100), False),
        (Size(9, 900), Size(1, 900), True),
        (Size(3, 3 << 20), Size(3, 1 << 20), True),
    ],
)
def test_fewer_than_half_of_files_or_bytes_is_a_wipe(before: Size, after: Size, *, wipes: bool) -> None:
    assert retention.would_wipe(before, after) is wipes


def applied(view: DictView, changes: dict[bytes, bytes | None]) -> None:
    for key, value in changes.items():
        if value is None:
            del view.rows[key]
        else:
            view.rows[key] = value


@pytest.mark.history("L13")
@pytest.mark.promise("P-18")
def test_L13_only_the_newest_three_pins_stay_and_they_end_after_seven_days() -> None:
    view = DictView({RETENTION_TABLE + b"trace": b"another row", SNAPSHOT_TABLE + b"best": encode_u64(4)})
    for number in range(10, 20):
        applied(view, retention.pin(view, ManifestNumber(number), 1000.5 + number))
    week = 7 * 86_400
    assert retention.pins_in(view) == {ManifestNumber(n): 1000 + n + week for n in (17, 18, 19)}
    applied(view, retention.ended_pins(view, 1018 + week))
    assert set(retention.pins_in(view)) == numbers(19)
    assert retention.names_in(view) == {b"best": 4}
    assert len(view.rows) == 3


def test_a_fresh_node_finds_states_older_than_the_base() -> None:
    torn = item("a.pt", torn=True)
    keep = retention.retained([state(1), state(2, torn), state(9, torn, item("b.pt"))], 1e6)
    view = DictView()
    applied(view, retention.keep_changes(view, keep, ManifestNumber(5)))
    assert retention.keeps_in(view) == numbers(1, 2)
    assert retention.keep_changes(view, keep, ManifestNumber(5)) == {}
    applied(view, retention.keep_changes(view, keep, ManifestNumber(2)))
    assert retention.keeps_in(view) == numbers(1)
