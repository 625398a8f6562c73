"""Is a damaged pack an error of the read that needs it, and of nothing else?"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, packs_of
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-08")]

MIB = 1 << 20


def read_block(path: Path, block: int) -> bytes | int | None:
    """The bytes of a block, or the errno of reading them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, MIB, block * MIB)
    except OSError as error:
        return error.errno
    finally:
        os.close(fd)


def test_a_flipped_byte_is_eio_where_it_is_and_never_zeros(fleet: Fleet) -> None:
    node = fleet.node().start()
    body = random.Random(5).randbytes(6 * MIB)
    (node.root / "f").write_bytes(body)
    (node.root / "other").write_bytes(body[::-1])
    node.umount()
    pack = max(packs_of(fleet.store), key=lambda path: path.stat().st_size)
    good = pack.read_bytes()
    at = len(good) // 2
    pack.chmod(0o600)
    pack.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])

    fresh = fleet.node().start()
    answers = {(name, block): read_block(fresh.root / name, block) for name in ("f", "other") for block in range(6)}
    damaged = [where for where, answer in answers.items() if answer == errno.EIO]
    assert len(damaged) == 1
    for (name, block), answer in answers.items():
        whole = body if name == "f" else body[::-1]
        assert (name, block) in damaged or answer == whole[block * MIB : (block + 1) * MIB]
    assert fresh.status()["store_error"]

    # The same block is asked for again once the store has its bytes back.
    pack.write_bytes(good)
    assert (fresh.root / "f").read_bytes() == body
    assert (fresh.root / "other").read_bytes() == body[::-1]
