"""Can somebody who has docs/FORMAT.md and a copy of the bucket, but no SpotWarp, get everything back?"""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import changesets, layout, manifests, sections
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.codec import Effort
from spotwarp_fs.core.frames import digest, encode_frame
from spotwarp_fs.core.manifests import InFlightItem, Manifest, digest_of
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.rebase import merge_section, plan_merge
from spotwarp_fs.core.records import (
    EntryRecord,
    FrameRef,
    InodeRecord,
    block_key,
    entry_key,
    inode_key,
    xattr_key,
)
from spotwarp_fs.core.sections import MetadataWriter
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, ChangeSeq, Inode, ManifestNumber, PackId, WriterEpoch

READER = Path(__file__).parents[2] / "docs" / "reader.py"
WORKSPACE_ID = "0123456789abcdef"
MTIME_NS = 1_600_000_000_123_456_789
WEIGHTS = (np.random.default_rng(5).standard_normal(BLOCK_BYTES // 4) * 0.02).astype(np.float32).tobytes()


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reader", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Workspace:
    """Writes a store the way an engine does, with the core's functions and plain files."""

    def __init__(self, store: Path) -> None:
        self.root = store / layout.workspace_root("run", WORKSPACE_ID)
        self.put(store / layout.workspace_identity_key("run"), layout.encode_identity(WORKSPACE_ID))
        self.packs = 0
        self.head: Manifest | None = None
        self.sets: list[ChangeSet] = []

    def put(self, path: Path, body: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists(), "everything that counts is created once"
        path.write_bytes(body)

    def new_pack(self) -> PackId:
        self.packs += 1
        return layout.pack_id(WriterEpoch(2), bytes([self.packs]) * 8)

    def put_pack(self, pack: PackId, body: bytes) -> None:
        self.put(self.root / layout.pack_key(pack), body)

    def blocks(self, ino: int, contents: dict[int, bytes]) -> dict[bytes, bytes | None]:
        builder = PackBuilder(self.new_pack())
        records: dict[bytes, bytes | None] = {}
        for block, raw in contents.items():
            ref = builder.add(encode_frame(raw), digest(raw), len(raw))
            records[block_key(Inode(ino), BlockIndex(block))] = ref.encode()
        self.put_pack(builder.pack, builder.finish())
        return records

    def publish(self, change_set: ChangeSet, *, rebase: bool = False, in_flight: tuple[InFlightItem, ...] = ()) -> None:
        parent = self.head
        writer = MetadataWriter(self.new_pack)
        changes = writer.write(change_set) if change_set else None
        base, base_number = (parent.base, parent.base_number) if parent else (None, ManifestNumber(0))
        if rebase:
            stream = writer.stream()
            for step in plan_merge(None, changesets.fold(self.sets)):
                stream.extend(merge_section((), step.part))  # type: ignore[union-attr]
            base, base_number = stream.finish().root, ManifestNumber(len(self.sets))
        self.sets.append(change_set)
        for pack, body in writer.finish():
            self.put_pack(pack, body)
        self.head = Manifest(
            number=ManifestNumber(len(self.sets)),
            writer_epoch=WriterEpoch(2),
            session="feed",
            workspace_id=WORKSPACE_ID,
            parent_digest=digest_of(manifests.encode(parent)) if parent else "",
            change_seq=ChangeSeq(len(self.sets)),
            created_s=1.7e9,
            base_number=base_number,
            base=base,
            changes=changes.root if changes else None,
            in_flight=in_flight,
        )
        if parent:
            manifests.check_successor(parent, self.head, parent_digest=self.head.parent_digest)
        self.put(self.root / layout.manifest_key(self.head.number), manifests.encode(self.head))


def inode(mode: int, size: int = 0, *, nlink: int = 1, target: bytes = b"") -> bytes:
    times = {"atime_ns": MTIME_NS + 7, "mtime_ns": MTIME_NS, "ctime_ns": MTIME_NS}
    return InodeRecord(mode, nlink, os.getuid(), os.getgid(), size, target=target, **times).encode()


def entry(ino: int, mode: int) -> bytes:
    return EntryRecord(Inode(ino), stat.S_IFMT(mode) >> 12).encode()


def name(parent: int, text: bytes) -> bytes:
    return entry_key(Inode(parent), text)


DIRECTORY, FILE, LINK, FIFO = stat.S_IFDIR | 0o750, stat.S_IFREG | 0o640, stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o600


def build(store: Path) -> Workspace:
    """Four states: files of every kind; changes of every kind; a new base; nothing changed."""
    workspace = Workspace(store)
    first: dict[bytes, bytes | None] = {
        inode_key(Inode(1)): inode(DIRECTORY),
        inode_key(Inode(2)): inode(DIRECTORY | stat.S_ISVTX),
        name(1, b"runs"): entry(2, DIRECTORY),
        inode_key(Inode(3)): inode(FILE, 3 * BLOCK_BYTES + 100, nlink=2),
        name(2, b"model.pt"): entry(3, FILE),
        name(1, b"best \xff.pt"): entry(3, FILE),
        inode_key(Inode(4)): inode(LINK, 13, target=b"runs/model.pt"),
        name(1, b"newest"): entry(4, LINK),
        inode_key(Inode(5)): inode(FIFO),
        name(1, b"pipe"): entry(5, FIFO),
        inode_key(Inode(6)): inode(FILE | stat.S_ISUID, 2 * BLOCK_BYTES),
        name(1, b"old.bin"): entry(6, FILE),
        xattr_key(Inode(3), b"user.job"): b"17\x00\xff",
        xattr_key(Inode(2), b"user.kind"): b"",
        b"sbefore": bytes(8),
    }
    first |= workspace.blocks(3, {0: WEIGHTS, 3: b"tail" * 25})
    first |= workspace.blocks(6, {0: bytes(100) + b"x" * 1000, 1: os.urandom(BLOCK_BYTES)})
    workspace.publish(ChangeSet.of({}, first))
    second: dict[bytes, bytes | None] = {
        name(1, b"old.bin"): None,
        name(2, b"renamed.bin"): entry(6, FILE),
        name(1, b"pipe"): None,
        inode_key(Inode(5)): None,
        inode_key(Inode(6)): inode(FILE | stat.S_ISUID, BLOCK_BYTES + 5000),
        xattr_key(Inode(3), b"user.job"): b"18",
    }
    second |= workspace.blocks(6, {1: b"short, then the file was extended"})
    workspace.publish(ChangeSet.of({Inode(6): BlockIndex(1)}, second))
    item = InFlightItem(Inode(3), b"runs/model.pt", "file")
    workspace.publish(ChangeSet.of({Inode(3): BlockIndex(3)}, {}), rebase=True, in_flight=(item,))
    workspace.publish(ChangeSet())
    return workspace


def restore(store: Path, destination: Path, *number: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(READER), str(store), "run", str(destination), *number]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("section_bytes", [200, 1 << 20])
def test_the_newest_state_comes_back_whole(tmp_path: Path, section_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SECTION_BYTES", section_bytes)
    monkeypatch.setattr(sections, "INLINE_BYTES_MAX", section_bytes)
    build(tmp_path / "store")
    out = tmp_path / "out"
    done = restore(tmp_path / "store", out)
    assert done.returncode == 0, done.stderr
    assert "restored state 4" in done.stdout
    assert sorted(os.listdir(os.fsencode(out))) == [b"best \xff.pt", b"newest", b"runs"]
    assert sorted(os.listdir(out / "runs")) == ["model.pt", "renamed.bin"]
    model = out / "runs" / "model.pt"
    assert model.read_bytes() == WEIGHTS + bytes(2 * BLOCK_BYTES + 100)
    assert os.lstat(os.fsencode(out) + b"/best \xff.pt").st_ino == model.stat().st_ino
    assert model.stat().st_blocks * 512 < 2 * BLOCK_BYTES, "holes stay holes"
    assert os.readlink(out / "newest") == "runs/model.pt"
    short = b"short, then the file was extended"
    expected = (bytes(100) + b"x" * 1000).ljust(BLOCK_BYTES, b"\0") + short + bytes(5000 - len(short))
    assert (out / "runs" / "renamed.bin").read_bytes() == expected
    assert stat.S_IMODE((out / "runs" / "renamed.bin").stat().st_mode) == 0o640 | stat.S_ISUID
    assert stat.S_IMODE((out / "runs").stat().st_mode) == 0o750 | stat.S_ISVTX
    for path in (out, out / "runs", model, out / "newest"):
        assert os.lstat(path).st_mtime_ns == MTIME_NS


def test_xattrs_come_back_where_the_filesystem_has_them(tmp_path: Path) -> None:
    build(tmp_path / "store")
    try:
        os.setxattr(tmp_path, "user.probe", b"1")
    except OSError as error:
        pytest.skip(f"no user xattrs here: {error}")
    assert restore(tmp_path / "store", tmp_path / "out").returncode == 0
    assert os.getxattr(tmp_path / "out" / "runs" / "model.pt", "user.job") == b"18"
    assert os.getxattr(tmp_path / "out" / "runs", "user.kind") == b""


def test_older_states_come_back_and_half_written_files_are_named(tmp_path: Path) -> None:
    build(tmp_path / "store")
    done = restore(tmp_path / "store", tmp_path / "first", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "first" / "runs" / "model.pt").read_bytes() == WEIGHTS + bytes(2 * BLOCK_BYTES) + b"tail" * 25
    assert stat.S_ISFIFO((tmp_path / "first" / "pipe").stat().st_mode)
    assert (tmp_path / "first" / "old.bin").stat().st_size == 2 * BLOCK_BYTES
    done = restore(tmp_path / "store", tmp_path / "third", "3")
    assert "may be incomplete: runs/model.pt" in done.stderr


@pytest.mark.promise("P-08")
def test_a_damaged_pack_is_never_restored_as_if_it_were_right(tmp_path: Path) -> None:
    build(tmp_path / "store")
    pack = min((tmp_path / "store").rglob("packs/*/*"))
    body = bytearray(pack.read_bytes())
    body[500_000] ^= 1
    pack.write_bytes(body)
    done = restore(tmp_path / "store", tmp_path / "out")
    assert done.returncode != 0
    assert pack.name in done.stderr
    assert "restored state" not in done.stdout


def test_a_chain_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    workspace = build(tmp_path / "store")
    assert workspace.head is not None
    path = workspace.root / layout.manifest_key(workspace.head.number)
    path.write_bytes(manifests.encode(replace(workspace.head, parent_digest=digest(b"rival").hex())))
    done = restore(tmp_path / "store", tmp_path / "out")
    assert done.returncode != 0
    assert "manifest 4 is no child" in done.stderr


def test_it_is_short_and_needs_nothing_of_spotwarp() -> None:
    text = READER.read_text()
    assert len(text.splitlines()) < 200
    assert "import spotwarp" not in text
    assert "from spotwarp" not in text


@settings(max_examples=40)
@given(st.integers(0, 20_000), st.sampled_from([1, 2, 3, 7]), st.sampled_from(Effort))
def test_it_decodes_what_the_codec_encodes(reader: ModuleType, size: int, phase: int, effort: Effort) -> None:
    raw = WEIGHTS[phase : phase + size]
    stored = encode_frame(raw, effort=effort)
    assert reader.decode(stored[1], stored[2], stored[8:], len(raw)) == raw


keys = st.one_of(
    st.builds(lambda ino, block: block_key(Inode(ino), BlockIndex(block)), st.integers(1, 3), st.integers(0, 5)),
    st.builds(lambda ino: inode_key(Inode(ino)), st.integers(1, 3)),
)
drops = st.dictionaries(st.integers(1, 3).map(Inode), st.integers(0, 5).map(BlockIndex), max_size=2)
changes = st.dictionaries(keys, st.one_of(st.none(), st.binary(max_size=5)), max_size=12)


@given(st.lists(st.builds(ChangeSet.of, drops, changes), max_size=4))
def test_it_means_the_same_by_a_change_set(reader: ModuleType, sets: list[ChangeSet]) -> None:
    ours: dict[bytes, bytes] = {}
    theirs: dict[bytes, bytes] = {}
    for change_set in sets:
        changesets.apply(ours, change_set)
        reader.change(theirs, changesets.encode_records(change_set))
    assert ours == theirs


def test_frame_ref_layout_is_what_the_format_page_says(reader: ModuleType) -> None:
    ref = FrameRef(PackId("00000003-00000000deadbeef"), 24, 12, 4, digest(b"spot"))
    assert reader.FRAME_REF.unpack(ref.encode()) == (3, 0xDEADBEEF, 24, 12, 4, digest(b"spot"))
