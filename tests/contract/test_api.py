"""Does the provisioner's door say what lies in the store, alike for a directory and for a real S3 server?"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
import trio

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.meeting import StoreShelf, StoreWorkspace
from spotwarp_fs import api
from spotwarp_fs.core.layout import encode_identity, workspace_identity_key
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.types import ManifestNumber, ObjectKey, WriterEpoch
from spotwarp_fs.engine.node_note import RentedNode
from spotwarp_fs.engine.permit import Permit
from tests.support.command_line import write
from tests.support.s3_server import S3Server
from tests.support.s3_server import s3_server as s3_server
from tests.support.world import WORKSPACE_ID, Node, start

SECRET = "do-not-show-this"


@pytest.fixture(params=["file", "s3"])
def variables(request: pytest.FixtureRequest, tmp_path: str) -> Mapping[str, str]:
    """What a user would have set."""
    home = {"SPOTWARP_STATE_DIR": f"{tmp_path}/state"}
    if request.param == "file":
        return {**home, "SPOTWARP_STORE": f"file://{tmp_path}/store"}
    server: S3Server = request.getfixturevalue("s3_server")
    chosen = server.settings
    return {
        **home,
        "SPOTWARP_STORE": server.url,
        "SPOTWARP_S3_REGION": str(chosen.region),
        "SPOTWARP_S3_ACCESS_KEY_ID": str(chosen.access_key_id),
        "SPOTWARP_S3_SECRET_ACCESS_KEY": str(chosen.secret_access_key),
    }


@pytest.fixture
async def store(variables: Mapping[str, str]) -> AsyncIterator[api.Store]:
    made = api.Store(api.load_settings(environ=variables).settings)
    yield made
    await made.aclose()


async def test_a_shelf_creates_once_and_finds_again(store: api.Store) -> None:
    shelf = StoreShelf(store)
    assert await shelf.get("jobs/a/spec") is None
    await shelf.put("jobs/a/spec", b"one")
    await shelf.put("jobs/a/spec", b"two")
    assert await shelf.get("jobs/a/spec") == b"two"
    assert await shelf.create("jobs/a/controllers/00000001", b"mine")
    assert await shelf.create("jobs/a/controllers/00000001", b"mine"), "a lost answer is no rival"
    assert not await shelf.create("jobs/a/controllers/00000001", b"yours")
    await shelf.put("jobs/b/spec", b"other")
    assert list(await shelf.list("jobs/a/")) == ["jobs/a/controllers/00000001", "jobs/a/spec"]
    await shelf.delete(["jobs/a/spec", "jobs/a/never"])
    assert await shelf.get("jobs/a/spec") is None


async def test_of_many_creators_one_wins(store: api.Store) -> None:
    won: list[int] = []

    async def one(number: int) -> None:
        if await store.create("jobs/a/controllers/00000002", b"by %d" % number):
            won.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(one, number)
    assert len(won) == 1
    assert await store.get("jobs/a/controllers/00000002") == b"by %d" % won[0]


async def test_a_link_reads_one_object_without_keys(store: api.Store) -> None:
    await store.put("bundles/ab.tgz", b"archive")
    await store.put("bundles/other.tgz", b"no")
    url = await store.link("bundles/ab.tgz", 60)

    def fetch(wanted: str) -> bytes:
        with urllib.request.urlopen(wanted, timeout=20) as answer:
            return bytes(answer.read())

    assert await trio.to_thread.run_sync(fetch, url) == b"archive"
    if url.startswith("http"):
        with pytest.raises(urllib.error.HTTPError):
            await trio.to_thread.run_sync(fetch, url.replace("ab.tgz", "other.tgz"))


def plain(variables: Mapping[str, str]) -> ObjectStore:
    from spotwarp_fs.cli.stores import open_plain_store

    return open_plain_store(api.load_settings(environ=variables).settings)


async def test_heads_heartbeats_and_states_are_those_of_the_newest_writer(
    store: api.Store, variables: Mapping[str, str]
) -> None:
    view, raw = StoreWorkspace(store, "test"), plain(variables)
    assert await view.head() is None
    assert await view.heartbeat() is None
    await raw.put(ObjectKey(workspace_identity_key("test")), encode_identity(WORKSPACE_ID))
    assert await view.head() is None, "it has a name and no state yet"

    async with start(raw, Node()) as session:
        await write(session, "weights", os.urandom(300_000))
        await session.streamer.barrier()
        first = await view.head()
        assert first is not None
        assert (first.writer_epoch, first.intent, first.quiescent, first.files) == (1, None, True, 1)
        assert first.logical_bytes == 300_000
        await session.heartbeat.beat()
        beat = await view.heartbeat()
        assert beat is not None
        with trio.fail_after(30):
            while await view.heartbeat() == beat:
                await trio.sleep(0.3)
                await session.heartbeat.beat()

    note = RentedNode("0123abcd-7", "i-5")
    async with start(raw, Node(), permit=Granted(WriterEpoch(4)), node_note=note) as session:
        head = await view.head()
        assert head is not None
        assert (head.writer_epoch, head.intent, head.instance_id) == (4, "0123abcd-7", "i-5")
        assert head.resumed_from == first.number
        await write(session, "more", b"x" * 1000)
        await session.streamer.barrier()
    states = await store.states("test", 10)
    assert [state.number for state in states] == list(range(1, states[-1].number + 1))
    assert max(state.sent_bytes for state in states) > 300_000
    assert states[-1].logical_bytes == 301_000
    assert len(await store.states("test", 2)) == 2
    await raw.aclose()


class Granted:
    """A permit that was given before anybody asked."""

    def __init__(self, epoch: WriterEpoch) -> None:
        self._epoch = epoch
        self.seen: list[ManifestNumber | None] = []

    def prefetched(self, number: ManifestNumber | None) -> None:
        self.seen.append(number)

    def granted(self) -> WriterEpoch | None:
        return self._epoch


def test_granted_is_a_permit() -> None:
    permit: Permit = Granted(WriterEpoch(1))
    assert permit.granted() == 1


async def test_node_settings_let_a_node_into_the_same_store_and_show_no_secret(variables: Mapping[str, str]) -> None:
    given = {**variables, "SPOTWARP_CACHE_SIZE": "64G", "SPOTWARP_ATOMIC": "*.pt, *.ckpt", "SPOTWARP_GRACE": "5m"}
    told = await api.node_settings(api.load_settings(environ=given))
    assert told.variables["SPOTWARP_GRACE"] == "5m"
    assert "SPOTWARP_CACHE_SIZE" not in told.variables, "that is this machine's"
    there = api.load_settings(environ={**told.variables, **told.secrets, "SPOTWARP_STATE_DIR": "/nowhere"}).settings
    assert there.atomic == ("*.pt", "*.ckpt")
    store = api.Store(there)
    await store.put("jobs/a/spec", b"from the node")
    assert await store.get("jobs/a/spec") == b"from the node"
    await store.aclose()
    for secret in told.secrets.values():
        assert secret not in repr(told)
        assert secret not in str(told.variables)


@pytest.fixture
def closed_door() -> Iterator[api.Store]:
    made = api.Store(
        api.load_settings(
            environ={
                "SPOTWARP_STORE": "s3://bucket/x",
                "SPOTWARP_S3_ENDPOINT": "http://127.0.0.1:9",
                "SPOTWARP_S3_REGION": "us-east-1",
                "SPOTWARP_S3_ACCESS_KEY_ID": "AKIA",
                "SPOTWARP_S3_SECRET_ACCESS_KEY": SECRET,
            }
        ).settings,
        deadline_s=0.5,
    )
    yield made
    trio.run(made.aclose)


async def test_a_store_that_does_not_answer_is_unavailable(closed_door: api.Store) -> None:
    shelf = StoreShelf(closed_door)
    for call in (shelf.get("k"), shelf.put("k", b""), shelf.create("k", b""), shelf.list("k"), shelf.delete(["k"])):
        with pytest.raises(StoreUnavailable) as raised:
            await call
        assert SECRET not in str(raised.value)


async def test_refused_keys_are_denied(s3_server: S3Server) -> None:
    location = s3_server.url
    store = api.Store(
        api.load_settings(
            environ={
                "SPOTWARP_STORE": location,
                "SPOTWARP_S3_REGION": "us-east-1",
                "SPOTWARP_S3_ACCESS_KEY_ID": "nobody",
                "SPOTWARP_S3_SECRET_ACCESS_KEY": SECRET,
            }
        ).settings,
        deadline_s=2.0,
    )
    with pytest.raises(StoreDenied) as raised:
        await StoreShelf(store).get("jobs/a/spec")
    assert SECRET not in str(raised.value)
    await store.aclose()
