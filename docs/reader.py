"""Restore one state of a SpotWarp workspace from a plain copy of its store; written from FORMAT.md alone.

    reader.py STORE_DIR NAME DEST [NUMBER]
Needs Python 3.11 and `pip install blake3 zstandard`, nothing of SpotWarp. Restores the newest state unless NUMBER says
otherwise; DEST must not exist. Only root can restore owners and device nodes.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import blake3
import zstandard

BLOCK = 1 << 20
FRAME_REF = struct.Struct(">IQIII32s")
INODE = struct.Struct(">IIIIQQQqqqI")


def demand(holds: bool, message: str) -> None:
    """Stop at the first thing that is not as the format says."""
    if not holds:
        raise ValueError(message)


class Store:
    """The objects of one workspace, in a directory."""

    def __init__(self, store: Path, name: str) -> None:
        top = store / "workspaces" / name
        self.root = top / str(json.loads((top / "id").read_bytes())["workspace_id"])

    def newest(self) -> int:
        """Find the head's number."""
        return max(int(path.name) for path in (self.root / "manifests").iterdir() if path.name.isdigit())

    def manifest(self, number: int) -> dict[str, Any]:
        """Read and check one manifest."""
        body = (self.root / "manifests" / f"{number:012d}").read_bytes()
        rest = b"{" + body[76:]
        check = blake3.blake3(rest).hexdigest().encode()
        demand(body[:76] == b'{"check":"' + check + b'",', f"manifest {number} fails its check")
        fields: dict[str, Any] = json.loads(rest)
        demand(fields["format"] == 1, f"manifest {number} has format {fields['format']}, this reader knows 1")
        demand(fields["number"] == number, f"manifest {number} says it is {fields['number']}")
        return fields | {"digest": blake3.blake3(body).hexdigest()}

    def frame(self, ref: bytes) -> bytes:
        """Read and decode the frame that a FrameRef names; give its content if it is the promised one."""
        writer_epoch, ident, offset, stored_bytes, raw_bytes, digest = FRAME_REF.unpack(ref)
        pack = f"{writer_epoch:08x}-{ident:016x}"
        where = f"frame in pack {pack} at {offset}"
        with open(self.root / "packs" / pack[9:11] / pack, "rb") as file:
            file.seek(offset)
            stored = file.read(stored_bytes)
        demand(len(stored) == stored_bytes >= 8 and stored[0] == 0xF1, f"{where}: is none")
        raw = decode(stored[1], stored[2], stored[8:], raw_bytes)
        demand(len(raw) == raw_bytes, f"{where}: {len(raw)} bytes instead of {raw_bytes}")
        demand(blake3.blake3(raw).digest() == digest, f"{where}: digest differs from {digest.hex()}")
        return raw

    def records(self, fields: dict[str, Any] | None) -> bytes:
        """Give the record stream of a base or a change set, as a manifest names it."""
        if fields is None:
            return b""
        numbers = *(int(part, 16) for part in fields["pack"].split("-")), fields["offset"], fields["stored_bytes"]
        root = self.frame(FRAME_REF.pack(*numbers, fields["raw_bytes"], bytes.fromhex(fields["digest"])))
        demand(root[:8] == b"SWROOT\x00\x01" and root[8] in (0, 1), f"no root in pack {fields['pack']}")
        if root[8] == 0:
            return root[16:]
        streams, at = [], 16
        for _ in range(struct.unpack_from(">I", root, 12)[0]):
            first_bytes, last_bytes = struct.unpack_from(">HH", root, at + 2)
            streams.append(self.frame(root[at + 10 : at + 66]))
            at += 66 + first_bytes + last_bytes
        return b"".join(streams)

    def state(self, number: int) -> dict[bytes, bytes]:
        """Build state *number*: its base, then the change sets after it."""
        named, state, parent = self.manifest(number), dict[bytes, bytes](), None
        change(state, self.records(named["base"]))
        for step in range(max(named["base_number"], 1), number + 1):
            manifest = self.manifest(step)
            demand(parent in (None, manifest["parent_digest"]), f"manifest {step} is no child of the one before it")
            parent = manifest["digest"]
            if step > named["base_number"]:
                change(state, self.records(manifest["changes"]))
        return state


def decode(encoding: int, param: int, payload: bytes, raw_bytes: int) -> bytes:
    """Undo a frame's encoding."""
    if encoding == 0:
        return payload
    if encoding == 1:
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=raw_bytes)
    demand(encoding == 2 and param in (1, 2, 4, 8), f"unknown encoding {encoding}, param {param}")
    count, at = raw_bytes // param, 4 * param
    raw = bytearray(raw_bytes)
    for number, size in enumerate(struct.unpack_from(f">{param}I", payload)):
        plane = payload[at : at + (size & 0x7FFFFFFF)]
        at += len(plane)
        if size >> 31:
            plane = zstandard.ZstdDecompressor().decompress(plane, max_output_size=count)
        raw[number : count * param : param] = plane  # refuses a plane of another length
    raw[count * param :] = payload[at:]
    return bytes(raw)


def change(state: dict[bytes, bytes], stream: bytes) -> None:
    """Apply a record stream: its drops come first by themselves."""
    at, drops = 0, dict[int, int]()
    while at < len(stream) and stream[at] == 1:
        inode, drops_from = struct.unpack_from(">QI", stream, at + 1)
        drops[inode], at = drops_from, at + 13
    for key in [key for key in state if drops and key[:1] == b"b"]:
        inode, block = struct.unpack_from(">QI", key, 1)
        if block >= drops.get(inode, block + 1):
            del state[key]
    while at < len(stream):
        if stream[at] == 2:
            key_bytes, value_bytes = struct.unpack_from(">HI", stream, at + 1)
            key_at, at = at + 7, at + 7 + key_bytes + value_bytes
            state[stream[key_at : key_at + key_bytes]] = stream[key_at + key_bytes : at]
        else:
            demand(stream[at] == 3, f"unknown operation {stream[at]} at byte {at}")
            key_at, at = at + 3, at + 3 + struct.unpack_from(">H", stream, at + 1)[0]
            state.pop(stream[key_at:at], None)
    demand(at == len(stream), "record stream ends inside a record")


class Restorer:
    """Lays a state out below a new directory."""

    def __init__(self, store: Store, state: dict[bytes, bytes]) -> None:
        self.store, self.state, self.placed = store, state, dict[bytes, bytes]()
        self.under: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for key, value in sorted(state.items()):
            self.under.setdefault(key[:9], []).append((key[9:], value))

    def place(self, inode: bytes, path: bytes) -> None:
        """Make the thing with number *inode* at *path*, with all that lies below it."""
        if inode in self.placed:
            return os.link(self.placed[inode], path, follow_symlinks=False)
        record = self.state[b"i" + inode]
        mode, _, uid, gid, size, _, rdev, atime, mtime, _, _ = INODE.unpack_from(record)
        self.placed[inode] = path
        self.make(inode, path, mode, size, rdev, record[INODE.size :])
        if os.geteuid() == 0:
            os.chown(path, uid, gid, follow_symlinks=False)
        for name, value in self.under.get(b"x" + inode, []):
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as error:
                print(f"not restored: xattr {name!r} of {os.fsdecode(path)}: {error.strerror}", file=sys.stderr)
        if not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode))
        os.utime(path, ns=(atime, mtime), follow_symlinks=False)

    def make(self, inode: bytes, path: bytes, mode: int, size: int, rdev: int, target: bytes) -> None:
        """Create it with its content: a directory's entries, a file's blocks (the rest stays a hole)."""
        if stat.S_ISLNK(mode):
            os.symlink(target, path)
        elif stat.S_ISDIR(mode):
            os.mkdir(path, 0o700)
            for name, value in self.under.get(b"e" + inode, []):
                demand(name not in (b"", b".", b"..") and not {0, 47} & set(name), f"bad name {name!r}")
                self.place(value[:8], path + b"/" + name)
        elif not stat.S_ISREG(mode):
            os.mknod(path, mode, rdev)
        else:
            with open(path, "wb") as file:
                file.truncate(size)
                for block, ref in self.under.get(b"b" + inode, []):
                    start = int.from_bytes(block, "big") * BLOCK
                    file.seek(start)
                    file.write(self.store.frame(ref)[: max(size - start, 0)])


def main(arguments: list[str]) -> None:
    """Run the command line above."""
    if len(arguments) not in (3, 4):
        sys.exit(__doc__)
    store = Store(Path(arguments[0]), arguments[1].lower())
    number = int(arguments[3]) if arguments[3:] else store.newest()
    Restorer(store, store.state(number)).place((1).to_bytes(8, "big"), os.fsencode(arguments[2]))
    for item in store.manifest(number)["in_flight"]:
        print(f"was being written, may be incomplete: {item.get('path') or item['path_base64']}", file=sys.stderr)
    print(f"restored state {number} of {arguments[1]} to {arguments[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
