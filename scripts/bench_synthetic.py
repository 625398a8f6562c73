"""A large workspace in the store without its bytes: metadata as the product writes them, most packs missing.

Invariant: what a fresh node reads while it mounts, and whatever it fetches ahead (small files, the newest checkpoint),
is there; the frames of older checkpoints and of the data set are only named: each with a digest of its own, in packs of
the usual size, so that the metadata are as large as if somebody had written all of it.
"""

import os
import random
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from bench_systems import BUCKET
from seaweed import Seaweed

from spotwarp_fs.core import layout, manifests
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.frames import digest, encode_frame
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.records import EntryRecord, FrameRef, InodeRecord, block_key, entry_key, inode_key
from spotwarp_fs.core.sections import MetadataWriter
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ChangeSeq, Inode, ManifestNumber, WriterEpoch

SMALL_BYTES = 4 << 10
SMALL_FRAMES = 512
"""Small files have one of so many contents."""
WEIGHT_FRAMES = 256
"""The newest checkpoint's blocks are taken from so many real ones."""
FRAMES_PER_PACK = 16
UPLOADS = 8
EPOCH = WriterEpoch(1)
FIRST_INODE = 1 << 40
OWNER = (0, 0)
DIRECTORY = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644


@dataclass(frozen=True)
class Shape:
    """How large a workspace is made."""

    small_files: int = 60_000
    data_files: int = 38_000
    data_blocks: int = 4
    checkpoints: int = 50
    shards: int = 40
    shard_blocks: int = 68
    later_states: int = 64
    """States after the base: a node meets half as many as make a new base, on average 128; the head is older here."""
    files_per_state: int = 20

    def divided(self, divisor: int) -> "Shape":
        """Give a smaller one, of the same proportions."""
        return replace(
            self,
            small_files=self.small_files // divisor,
            data_files=self.data_files // divisor,
            checkpoints=max(2, self.checkpoints // divisor),
        )

    def larger(self, factor: int) -> "Shape":
        """As many names, with so many times the bytes."""
        return replace(self, data_blocks=self.data_blocks * factor, shard_blocks=self.shard_blocks * factor)


@dataclass
class Synthetic:
    """What was made."""

    files: int = 0
    directories: int = 1
    logical_bytes: int = 0
    distinct_digests: int = 0
    metadata_bytes: int = 0
    """Stored bytes of the base and of all change sets after it."""
    base_bytes: int = 0
    newest: str = ""
    """The first shard of the newest checkpoint, as a path in the workspace."""
    small_directory: str = "src"
    records: dict[bytes, bytes] = field(default_factory=dict, repr=False)


class Maker:
    """Makes one workspace; nothing in it depends on anything but the shape and the seed."""

    def __init__(self, server: Seaweed, prefix: str, name: str, shape: Shape) -> None:
        self._random = random.Random(20)
        self._client = server.client()
        self._id = self._random.randbytes(16).hex()
        self._session = self._random.randbytes(16).hex()
        self._prefix, self._name = f"{prefix}/", name
        self._root = self._prefix + layout.workspace_root(name, self._id)
        self._shape = shape
        self._inode = FIRST_INODE
        self._now_ns = int(time.time() * 1e9)
        self._pool = ThreadPoolExecutor(UPLOADS)
        self.made = Synthetic()

    def make(self) -> Synthetic:
        """Put everything into the store: packs, then the manifests that name them."""
        with self._pool:
            small = self._real_frames(SMALL_FRAMES, lambda: os.urandom(SMALL_BYTES))
            weights = self._real_frames(WEIGHT_FRAMES, lambda: os.urandom(BLOCK_BYTES))
            directories = self._tree(small, weights)
            self._publish(directories, small)
        return self.made

    def _real_frames(self, count: int, content: Callable[[], bytes]) -> list[FrameRef]:
        found: list[FrameRef] = []
        builder = PackBuilder(self._new_pack())
        for _ in range(count):
            raw = content()
            stored = encode_frame(raw)
            if builder.full or not builder.fits(len(stored)):
                self._put_pack(builder.pack, builder.finish())
                builder = PackBuilder(self._new_pack())
            found.append(builder.add(stored, digest(raw), len(raw)))
        self._put_pack(builder.pack, builder.finish())
        self.made.distinct_digests += count
        return found

    def _named_frames(self) -> Iterator[bytes]:
        """Records of blocks that nobody wrote, neighbours in a pack; trained weights shrink to 0.83 of their size."""
        head, tail = struct.Struct(">IQIII"), self._random.randbytes
        while True:
            ident, offset = int.from_bytes(tail(8)), 24
            for _ in range(FRAMES_PER_PACK):
                stored = 870_000 + int.from_bytes(tail(2)) % 4_000
                yield head.pack(EPOCH, ident, offset, stored, BLOCK_BYTES) + tail(32)
                offset += stored

    def _tree(self, small: list[FrameRef], weights: list[FrameRef]) -> dict[Inode, str]:
        """Fill `made.records`; returns the directories of small files."""
        shape, named, chosen = self._shape, self._named_frames(), {}
        self._put_inode(ROOT_INODE, InodeRecord(DIRECTORY, 2, *OWNER, 0, **self._times(0)))
        source, data, saves = (self._directory(ROOT_INODE, name) for name in ("src", "data", "runs"))
        for number in range(shape.small_files):
            if number % 200 == 0:
                folder = self._directory(source, f"part{number // 200:05d}")
                chosen[folder] = f"src/part{number // 200:05d}"
            frame = small[number % len(small)].encode()
            self._file(folder, f"module{number:06d}.py", SMALL_BYTES, [frame])
        for number in range(shape.data_files):
            if number % 1000 == 0:
                folder = self._directory(data, f"shard{number // 1000:04d}")
            blocks = [next(named) for _ in range(shape.data_blocks)]
            self._file(folder, f"sample-{number:07d}.tar", shape.data_blocks * BLOCK_BYTES, blocks)
            self.made.distinct_digests += len(blocks)
        for number in range(shape.checkpoints):
            newest = number == shape.checkpoints - 1
            folder = self._directory(saves, f"checkpoint-{number:06d}", age_s=60 * (shape.checkpoints - number))
            for shard in range(shape.shards):
                if newest:
                    first = shard * 7
                    blocks = [weights[(first + at) % len(weights)].encode() for at in range(shape.shard_blocks)]
                else:
                    blocks = [next(named) for _ in range(shape.shard_blocks)]
                    self.made.distinct_digests += len(blocks)
                name = f"model-{shard:05d}.safetensors"
                self._file(folder, name, shape.shard_blocks * BLOCK_BYTES, blocks)
        self.made.newest = f"runs/checkpoint-{shape.checkpoints - 1:06d}/model-00000.safetensors"
        return chosen

    def _directory(self, parent: Inode, name: str, age_s: int = 3600) -> Inode:
        ino = self._entry(parent, name, stat.S_IFDIR)
        self._put_inode(ino, InodeRecord(DIRECTORY, 2, *OWNER, 0, **self._times(age_s)))
        above = InodeRecord.decode(self.made.records[inode_key(parent)])
        self._put_inode(parent, replace(above, nlink=above.nlink + 1))
        self.made.directories += 1
        return ino

    def _file(self, parent: Inode, name: str, size: int, blocks: list[bytes]) -> Inode:
        ino = self._entry(parent, name, stat.S_IFREG)
        allocated = len(blocks) * BLOCK_BYTES
        times = self._times(self._random.randrange(3600, 1 << 22))
        self._put_inode(ino, InodeRecord(FILE, 1, *OWNER, size, allocated, **times))
        for index, block in enumerate(blocks):
            self.made.records[block_key(ino, BlockIndex(index))] = block
        self.made.files += 1
        self.made.logical_bytes += size
        return ino

    def _entry(self, parent: Inode, name: str, kind: int) -> Inode:
        ino = Inode(self._inode)
        self._inode += 1
        self.made.records[entry_key(parent, name.encode())] = EntryRecord(ino, kind >> 12).encode()
        return ino

    def _put_inode(self, ino: Inode, record: InodeRecord) -> None:
        self.made.records[inode_key(ino)] = record.encode()

    def _times(self, age_s: int) -> dict[str, int]:
        at_ns = self._now_ns - age_s * 1_000_000_000 + self._random.randrange(1_000_000_000)
        return {"atime_ns": at_ns, "mtime_ns": at_ns, "ctime_ns": at_ns}

    def _publish(self, directories: dict[Inode, str], small: list[FrameRef]) -> None:
        """State 1 is everything, and the base of all after it; each of those adds a few files."""
        records, self.made.records = self.made.records, {}
        writer = MetadataWriter(self._new_pack)
        stream = writer.stream()
        for key in sorted(records):
            stream.change(key, records[key])
            for pack, body in writer.take_packs():
                self._put_pack(pack, body)
        base = stream.finish()
        for pack, body in writer.finish():
            self._put_pack(pack, body)
        self._put(self._prefix + layout.workspace_identity_key(self._name), layout.encode_identity(self._id))
        head, parent = self._first(base.root, base.stored_bytes), ""
        body = self._create(replace(head, parent_digest=parent))
        self.made.base_bytes = self.made.metadata_bytes = base.stored_bytes
        for number in range(self._shape.later_states):
            change_set = self._few_files(directories, small, number)
            few = MetadataWriter(self._new_pack)
            written = few.write(change_set)
            for pack, stored in few.finish():
                self._put_pack(pack, stored)
            head = self._next(head, body, base.root, base.stored_bytes)
            head = replace(head, changes=written.root, changes_bytes=head.changes_bytes + written.stored_bytes)
            self.made.metadata_bytes += written.stored_bytes
            body = self._create(head)
        self._put(self._root + layout.HEAD_HINT, str(head.number).encode())

    def _few_files(self, directories: dict[Inode, str], small: list[FrameRef], number: int) -> ChangeSet:
        parents = list(directories)
        for each in range(self._shape.files_per_state):
            block = small[self._random.randrange(len(small))].encode()
            parent = parents[(number * 31 + each) % len(parents)]
            self._file(parent, f"later{number:04d}-{each:03d}.py", SMALL_BYTES, [block])
        records, self.made.records = self.made.records, {}
        return ChangeSet.of({}, records)

    def _first(self, root: FrameRef, stored_bytes: int) -> Manifest:
        return Manifest(
            number=ManifestNumber(1), writer_epoch=EPOCH, session=self._session, workspace_id=self._id,
            parent_digest="", change_seq=ChangeSeq(1), created_s=self._now_ns / 1e9, changes=root,
            changes_bytes=stored_bytes, files=self.made.files, directories=self.made.directories,
            logical_bytes=self.made.logical_bytes,
        )  # fmt: skip

    def _next(self, head: Manifest, body: bytes, base: FrameRef, base_bytes: int) -> Manifest:
        return replace(
            head, number=ManifestNumber(head.number + 1), parent_digest=manifests.digest_of(body),
            change_seq=ChangeSeq(head.change_seq + 1), base_number=ManifestNumber(1), base=base, base_bytes=base_bytes,
            changes_bytes=head.changes_bytes if head.number > 1 else 0, files=self.made.files,
            directories=self.made.directories, logical_bytes=self.made.logical_bytes,
        )  # fmt: skip

    def _create(self, manifest: Manifest) -> bytes:
        body = manifests.encode(manifest)
        self._put(self._root + layout.manifest_key(manifest.number), body)
        return body

    def _new_pack(self):  # type: ignore[no-untyped-def]
        return layout.pack_id(EPOCH, self._random.randbytes(8))

    def _put_pack(self, pack, body: bytes) -> None:  # type: ignore[no-untyped-def]
        self._put(self._root + layout.pack_key(pack), body)

    def _put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=body)
