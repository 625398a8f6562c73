"""Does a new base hold what the old one and the changes after it held, and do unread block maps survive it?"""

from __future__ import annotations

from dataclasses import replace

import trio

from spotwarp_fs.core.types import ROOT_INODE
from tests.sim.test_skeleton import in_world, read_file, write_file
from tests.support.world import FAST, Node, new_store, start


def test_states_are_the_same_across_many_bases() -> None:
    settings = replace(FAST, rebase_manifests_max=3)
    contents = {f"f{i}".encode(): bytes([i]) * (1_500_000 + i) for i in range(8)}

    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=settings) as session:
            for name, data in contents.items():
                await write_file(session, name, data)
                await session.streamer.barrier()
                await trio.sleep(2)
            await write_file(session, b"late", b"x")
            await session.streamer.barrier()
            assert session.streamer.head.manifest.base_number > 3
        async with start(store, Node(), settings=settings) as session:
            assert await read_file(session, b"f3") == contents[b"f3"]
            await session.filesystem.unlink(ROOT_INODE, b"f0")
            for i in range(8):
                await write_file(session, b"more%d" % i, b"y" * i)
                await session.streamer.barrier()
                await trio.sleep(2)
            for name in list(contents)[1:]:
                assert await read_file(session, name) == contents[name]
        async with start(store, Node(), settings=settings) as session:
            for name in list(contents)[1:]:
                assert await read_file(session, name) == contents[name]
            assert session.workspace.files == 7 + 1 + 8

    in_world(main)
