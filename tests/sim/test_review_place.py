"""F08: a state with absolute paths in it is taken over at another mountpoint."""

from __future__ import annotations

from dataclasses import replace

from spotwarp_fs.engine.place import moved
from spotwarp_fs.engine.session import Session
from tests.support.virtual import create, in_virtual_time
from tests.support.world import Node, new_store, start


def test_F08_a_takeover_at_another_path_is_told_so() -> None:
    """1. A makes a virtual environment at /mnt. 2. B takes over at /data. 3. The program that meets the first absolute
    path in it fails after hours: the mount has to say it before. A tool in between (a push) mounts nothing."""

    async def main() -> None:
        store = new_store()

        async def publish(session: Session, name: bytes) -> None:
            await create(session, name, b"x")
            await session.streamer.barrier()

        async with start(store, Node()) as session:
            assert moved(session.claimed.resumed_from, "/mnt") == ()
            await publish(session, b"a")
        for _ in range(2):
            async with start(store, Node()) as session:
                resumed = session.claimed.resumed_from
                assert moved(resumed, "/mnt") == ()
                (line,) = moved(resumed, "/data")
                assert "/mnt" in line
                assert "/data" in line
        async with start(store, Node(), mountpoint="pushing") as session:
            await publish(session, b"b")
        async with start(store, Node(), mountpoint="/data") as session:
            assert moved(session.claimed.resumed_from, "/data")
            await publish(session, b"c")
            head = session.streamer.head.manifest
            assert moved(head, "/data") == ()
            assert moved(replace(head, notes={}), "/elsewhere") == ()

    in_virtual_time(main)
