"""Hypothesis strategies for random programs, shared by the core, engine and mounted model tests.

@given(programs())
def test_it(program: list[Call]) -> None:
    reference = Reference(now_ns=1)
    for now_ns, drawn in enumerate(program, 2):
        call = settle(drawn, reference)
        assert perform(call, now_ns) == reference.apply(call, now_ns), call
        assert diff(reference.snapshot(), observe(...)) == []
"""

from __future__ import annotations

import stat

from hypothesis import strategies as st

from tests.support.calls import (
    Append,
    Call,
    Chmod,
    Chown,
    Create,
    Existing,
    Fsync,
    Link,
    Mkdir,
    Mknod,
    Place,
    Remount,
    RemoveXattr,
    Rename,
    Rmdir,
    Save,
    SetXattr,
    Symlink,
    Sync,
    Takeover,
    Truncate,
    Unlink,
    Utimens,
    Write,
    WriteUnlinked,
)

MIB = 1 << 20
SMALL_LENGTHS = (1, 5, 4096, 70_000)
LARGE_LENGTHS = (*SMALL_LENGTHS, MIB - 1, MIB, MIB + 1, 2 * MIB + 77)
OFFSETS = (0, 0, 1, 4095, 65_536, MIB - 1, MIB, MIB + 1, 2 * MIB + 5, 3 * MIB + 12_345)
SIZES = (0, 0, 1, 100, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 9)
TIMES_NS = (0, 1, -1_500_000_000, 1_490_219_287_999_999_900, 1_700_000_000_000_000_001, 4_102_444_800_123_456_789)
TARGETS = (b"a", b"../b", b"/a/c", b"nowhere", b"\xff", b"t" * 3000)
DRAWN_MAX = 1 << 16

_indexes = st.integers(0, 40)
_seeds = st.integers(0, DRAWN_MAX)


def _existing(kinds: str) -> st.SearchStrategy[Existing]:
    return st.builds(Existing, _indexes, st.just(kinds))


# Names near the front of the table are drawn more often: programs come back to the same names.
_places = st.builds(Place, _indexes, st.sampled_from((0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)))
_anything = _existing("fdlo")
_files = _existing("f")
_openable = st.one_of(_files, _files, _files, _existing("fdl"))


def _contents(lengths: tuple[int, ...]) -> list[st.SearchStrategy[Call]]:
    amounts = st.sampled_from(lengths)
    return [
        st.builds(Write, _openable, st.sampled_from(OFFSETS), amounts, _seeds),
        st.builds(Append, _openable, amounts, _seeds),
        st.builds(Save, st.one_of(_places, _places, _openable), amounts, _seeds),
        st.builds(Truncate, _openable, st.sampled_from(SIZES)),
        st.builds(WriteUnlinked, _openable, st.sampled_from(SMALL_LENGTHS), _seeds),
        st.builds(Fsync, _existing("fd")),
    ]


def _names() -> list[st.SearchStrategy[Call]]:
    sources = st.one_of(_anything, _anything, _places)
    targets = st.one_of(_places, _anything)
    return [
        st.builds(Mkdir, _places, st.sampled_from((0o755, 0o700, 0o1755))),
        st.builds(Mkdir, _places),
        st.builds(Create, _places, st.sampled_from((0o644, 0o600, 0o755))),
        st.builds(Create, st.one_of(_places, _anything)),
        st.builds(Symlink, _places, st.sampled_from(TARGETS)),
        st.builds(Mknod, _places, st.sampled_from((stat.S_IFIFO | 0o600, stat.S_IFSOCK | 0o755))),
        st.builds(Link, st.one_of(_files, _files, _anything), targets),
        st.builds(Unlink, sources),
        st.builds(Rmdir, st.one_of(_existing("d"), _existing("d"), sources)),
        st.builds(Rename, sources, targets, st.just(0)),
        st.builds(Rename, _anything, targets, st.just(0)),
        st.builds(Rename, sources, targets, st.sampled_from((1, 2, 2, 3, 8))),
        st.builds(Rename, _anything, _anything, st.sampled_from((0, 2))),
        st.builds(Rename, _existing("d"), _existing("d"), st.just(0)),
        st.builds(Rename, _existing("d"), _existing("d"), st.just(0)),
    ]


def _attributes(*, privileged: bool) -> list[st.SearchStrategy[Call]]:
    names = (b"user.a", b"user.b", b"user.\xff")
    modes = (0o644, 0o600, 0o755, 0o700)
    choices: list[st.SearchStrategy[Call]] = [
        st.builds(Utimens, _anything, st.sampled_from(TIMES_NS), st.sampled_from(TIMES_NS)),
    ]
    if privileged:
        names += (b"trusted.a",)
        modes += (0o4755, 0o2755, 0o2644, 0o1777)
        ids = st.sampled_from((0, 1234, 65_534))
        choices.append(st.builds(Chown, _anything, ids, ids))
        choices.append(st.builds(Chown, _existing("d"), st.just(0), st.just(1234)))
        choices.append(st.builds(Chmod, _existing("d"), st.just(0o2775)))
        device = st.just(stat.S_IFCHR | 0o600)
        choices.append(st.builds(Mknod, _places, device, st.sampled_from(((1 << 8) | 3, (1 << 8) | 5))))
    choices.append(st.builds(Chmod, st.one_of(_existing("d"), _existing("fdo")), st.sampled_from(modes)))
    values = st.binary(max_size=40)
    choices.append(st.builds(SetXattr, _anything, st.sampled_from(names), values, st.sampled_from((0, 0, 0, 1, 2))))
    choices.append(st.builds(RemoveXattr, _anything, st.sampled_from(names)))
    return choices


def calls(*, privileged: bool = True, large: bool = True, markers: bool = False) -> st.SearchStrategy[Call]:
    """One call with operands to settle. *privileged*: also what only root may do. *large*: also over several blocks."""
    contents = _contents(LARGE_LENGTHS if large else SMALL_LENGTHS)
    groups = [st.one_of(_names()), st.one_of(_names()), st.one_of(contents), st.one_of(contents)]
    groups.append(st.one_of(_attributes(privileged=privileged)))
    if markers:
        groups.append(st.sampled_from((Sync(), Sync(), Remount(), Takeover())))
    return st.one_of(groups)


def programs(
    *, length_max: int = 40, privileged: bool = True, large: bool = True, markers: bool = False
) -> st.SearchStrategy[list[Call]]:
    """A list of calls; it starts with a few names, so that the rest has something to work on."""
    first: list[Call] = [Mkdir(b"a"), Create(b"b"), Mkdir(b"a/b")]
    # Hypothesis keeps one list short on average; four in a row make programs long enough to meet their own past.
    part = st.lists(calls(privileged=privileged, large=large, markers=markers), max_size=length_max // 4)
    rest = st.tuples(part, part, part, part).map(lambda parts: [call for drawn in parts for call in drawn])
    return rest.map(lambda drawn: [*first, *drawn])
