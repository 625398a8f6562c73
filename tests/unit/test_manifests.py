"""Is a manifest one body per state, does damage show, and is a wrong successor refused?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import manifests
from spotwarp_fs.core.errors import Corrupt, ExitCode, UserError
from spotwarp_fs.core.frames import digest
from spotwarp_fs.core.manifests import InFlightItem, Manifest, check_successor, digest_of
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import ChangeSeq, Inode, ManifestNumber, PackId, WriterEpoch

GOLDEN = Path(__file__).parent / "golden"
REF = FrameRef(PackId("00000003-00000000deadbeef"), 24, 12, 4, digest(b"spot"))
EXAMPLE = Manifest(
    number=ManifestNumber(8),
    writer_epoch=WriterEpoch(3),
    session="5e5510",
    workspace_id="0123456789abcdef",
    parent_digest=digest(b"parent").hex(),
    change_seq=ChangeSeq(812),
    created_s=1_700_000_000.25,
    base_number=ManifestNumber(4),
    base=REF,
    changes=replace(REF, offset=36),
    base_bytes=900,
    changes_bytes=400,
    in_flight=(
        InFlightItem(Inode(77), b"runs/model.pt", "file"),
        InFlightItem(Inode(78), b"caf\xe9/\xff", "directory", torn=True),
    ),
    barrier=True,
    takeover={"replaced": ["runs/model.pt"], "from": 6},
    files=12,
    directories=3,
    logical_bytes=1 << 40,
    notes={"forced_by": "sync", "host": "größe"},
)
texts = st.text(max_size=12)
naturals = st.integers(0, 1 << 60)
manifests_any = st.builds(
    Manifest,
    number=naturals.map(ManifestNumber),
    writer_epoch=naturals.map(WriterEpoch),
    session=texts,
    workspace_id=texts,
    parent_digest=texts,
    change_seq=naturals.map(ChangeSeq),
    created_s=st.floats(0, 1e11),
    base=st.sampled_from([None, REF]),
    changes=st.sampled_from([None, REF]),
    in_flight=st.lists(
        st.builds(
            InFlightItem,
            naturals.map(Inode),
            st.binary(max_size=9),
            st.sampled_from(["file", "directory"]),
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    barrier=st.booleans(),
    takeover=st.one_of(st.none(), st.dictionaries(texts, st.one_of(texts, naturals), max_size=2)),
    notes=st.dictionaries(texts, st.one_of(texts, naturals, st.lists(texts, max_size=2)), max_size=2),
)


@settings(max_examples=80)
@given(manifests_any)
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    body = manifests.encode(manifest)
    assert manifests.decode(body) == manifest
    assert manifests.encode(manifests.decode(body)) == body
    assert body.isascii()
    assert body.count(b"\n") == 1


@given(st.data())
def test_every_flipped_bit_and_every_cut_shows(data: st.DataObject) -> None:
    body = bytearray(manifests.encode(EXAMPLE))
    cut = bytes(body[: data.draw(st.integers(0, len(body) - 1))])
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(body), cut):
        with pytest.raises(Corrupt):
            manifests.decode(damaged)


def test_golden_manifest() -> None:
    """Bytes of format 1: a change here is a change of the format."""
    body = bytes.fromhex((GOLDEN / "manifest.hex").read_text())
    assert manifests.encode(EXAMPLE) == body
    assert manifests.decode(body) == EXAMPLE


def forge(**changed: Any) -> bytes:
    """A manifest with a valid check and fields that this version would not write."""
    import json

    fields = json.loads(manifests.encode(EXAMPLE))
    del fields["check"]
    fields.update(changed)
    rest = json.dumps({k: v for k, v in fields.items() if v != "REMOVED"}, sort_keys=True).encode() + b"\n"
    return b'{"check":"' + digest_of(rest).encode() + b'",' + rest[1:]


def test_a_newer_format_asks_for_an_upgrade() -> None:
    with pytest.raises(UserError, match=r"manifest 8 has store format 2, .* up to format 1: upgrade") as caught:
        manifests.decode(forge(format=2), what="manifest 8")
    assert caught.value.exit_code is ExitCode.NEWER_FORMAT


def test_an_unknown_field_of_the_same_format_is_ignored() -> None:
    assert manifests.decode(forge(color="red")) == EXAMPLE


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 0}, {"format": "1"}, {"number": -1}, {"number": "8"}, {"number": "REMOVED"}, {"base": "x"},
        {"base": {"pack": "zz", "offset": 0, "stored_bytes": 1, "raw_bytes": 1, "digest": "00" * 32}},
        {"base": {"pack": REF.pack, "offset": 1 << 40, "stored_bytes": 1, "raw_bytes": 1, "digest": "00" * 32}},
        {"base": {"pack": REF.pack, "offset": 0, "stored_bytes": 1, "raw_bytes": 1, "digest": "00"}},
        {"in_flight": [{"ino": 1, "path": "x", "kind": "socket", "torn": False}]},
        {"in_flight": [{"ino": 1, "kind": "file", "torn": False}]}, {"writer_epoch": True},
    ],
)  # fmt: skip
def test_wrong_fields_are_corrupt(changed: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        manifests.decode(forge(**changed))


def test_torn_things_do_not_block_quiescence() -> None:
    assert not EXAMPLE.quiescent
    assert replace(EXAMPLE, in_flight=EXAMPLE.in_flight[1:]).quiescent
    assert replace(EXAMPLE, in_flight=()).quiescent


def child_of(parent: Manifest, **changed: Any) -> Manifest:
    fields: dict[str, Any] = {
        "number": parent.number + 1,
        "parent_digest": digest_of(manifests.encode(parent)),
        "change_seq": parent.change_seq + 1,
    }
    return replace(parent, **{**fields, **changed})


@pytest.mark.history("C17")
@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"number": 10}, "numbers are dense"),
        ({"number": 8}, "numbers are dense"),
        ({"workspace_id": "fedcba9876543210"}, "the workspace stays"),
        ({"parent_digest": digest(b"rival").hex()}, "a child names its parent"),
        ({"writer_epoch": 2, "session": "older"}, "writer epochs never fall"),
        ({"session": "another"}, "one session per writer epoch"),
        ({"change_seq": 811}, "the change seq never falls"),
        ({"base_number": 3}, "a base never goes back"),
        ({"base_number": 10}, "a base is not newer"),
        ({"base": None}, "a base has one root"),
    ],
)
def test_a_wrong_successor_is_refused(changed: dict[str, Any], rule: str) -> None:
    parent_digest = digest_of(manifests.encode(EXAMPLE))
    with pytest.raises(Corrupt, match=rule):
        check_successor(EXAMPLE, child_of(EXAMPLE, **changed), parent_digest=parent_digest)


def test_right_successors_pass() -> None:
    parent_digest = digest_of(manifests.encode(EXAMPLE))
    for changed in (
        {},
        {"change_seq": EXAMPLE.change_seq},
        {"writer_epoch": 4, "session": "new"},
        {"base_number": 8, "base": replace(REF, offset=99)},
    ):
        check_successor(EXAMPLE, child_of(EXAMPLE, **changed), parent_digest=parent_digest)
