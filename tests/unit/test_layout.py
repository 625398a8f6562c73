"""Are keys well formed, below their workspace, and names refused with the character that is wrong?"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import Corrupt, ExitCode, UserError
from spotwarp_fs.core.types import ManifestNumber, PackId, WriterEpoch


@given(st.integers(1, 10**12 - 1).map(ManifestNumber))
def test_manifest_keys_sort_as_their_numbers(number: ManifestNumber) -> None:
    key = layout.manifest_key(number)
    assert layout.manifest_number(key) == number
    assert layout.manifest_number("workspaces/a/0123456789abcdef/" + key) == number
    if number > 1:
        assert layout.manifest_key(ManifestNumber(number - 1)) < key


@given(st.integers(0, 2**32 - 1).map(WriterEpoch), st.binary(min_size=8, max_size=8))
def test_pack_keys_lead_back_to_their_pack(epoch: WriterEpoch, ident: bytes) -> None:
    pack = layout.pack_id(epoch, ident)
    key = layout.pack_key(pack)
    assert key == f"packs/{ident.hex()[:2]}/{pack}"
    assert layout.pack_of(key) == pack
    assert layout.manifest_number(key) is None


def test_foreign_objects_are_nobody() -> None:
    assert layout.pack_of("packs/ff/00000001-0000000000000000") is None, "wrong folder"
    assert layout.pack_of("hints/head") is None
    assert layout.manifest_number("manifests/1") is None


def test_keys_of_hints_and_salvage() -> None:
    keys = [
        layout.HEAD_HINT, layout.HEARTBEAT, layout.pin_key("ab12"), layout.request_key("ab12"),
        layout.salvage_prefix(WriterEpoch(7), "node-1") + "records", layout.workspace_identity_key("a.b"),
        layout.workspace_root("a.b", "0123456789abcdef"), layout.pack_key(PackId("00000001-00000000000000aa")),
    ]  # fmt: skip
    assert keys[4] == "salvage/00000007-node-1/records"
    assert all(re.fullmatch(r"[a-z0-9/._-]+", key) for key in keys)
    with pytest.raises(AssertionError):
        layout.pin_key("../../other")


@pytest.mark.parametrize("name", ["a", "A-run_1.2", "0" * 63])
def test_good_names_are_lowered(name: str) -> None:
    assert layout.workspace_name(name) == name.lower()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "empty"), (".hidden", "character 1 is '.'"), ("my run", "character 3 is ' '"),
        ("a/b", "character 2 is '/'"),
        ("größe", "character 3 is 'ö'"), ("a" * 64, "64 characters, at most 63"), ("-x", "begin with a-z or 0-9"),
    ],
)  # fmt: skip
def test_bad_names_say_what_is_wrong(name: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        layout.workspace_name(name)


def test_identity() -> None:
    body = layout.encode_identity("0123456789abcdef")
    assert layout.decode_identity("run", body) == "0123456789abcdef"
    assert body == b'{"format": 1, "workspace_id": "0123456789abcdef"}\n'
    with pytest.raises(UserError, match="format 2") as caught:
        layout.decode_identity("run", body.replace(b"1,", b"2,"))
    assert caught.value.exit_code is ExitCode.NEWER_FORMAT
    for damaged in (b"", b"[]", b"{}", b'{"format": 1, "workspace_id": "../x"}', b'{"format": 1, "workspace_id": 3}'):
        with pytest.raises(Corrupt):
            layout.decode_identity("run", damaged)
