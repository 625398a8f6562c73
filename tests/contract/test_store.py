"""Does every adapter mean the same by the port? One suite for all of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.errors import Corrupt, NotFound, PreconditionFailed
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.directory import DirectoryStore
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.retry import Retrying, RetryPolicy
from spotwarp_fs.store.scoped import Scoped
from spotwarp_fs.store.urls import StoreSettings, open_store, parse_store_url
from tests.support.gcs_server import ACCESS_ID, SECRET, gcs_server
from tests.support.s3_server import S3Server

KINDS = ("memory", "directory", "s3", "gcs", "retrying", "scoped")
FOREVER = 3600.0


@dataclass
class SeededEntropy:
    rng: random.Random

    def token_bytes(self, count: int) -> bytes:
        return self.rng.randbytes(count)


@pytest.fixture(scope="module")
def google() -> Iterator[ObjectStore]:
    """One adapter for all tests: making an SDK client costs more than most of them."""
    settings = StoreSettings(access_key_id=ACCESS_ID, secret_access_key=SECRET, list_page_keys=3)
    with gcs_server(key_interval_s=0.0) as (endpoint, _):
        yield open_store(parse_store_url(f"gs://bucket/all tests?endpoint={endpoint}"), settings)


@pytest.fixture(scope="module")
def seaweed(s3_server: S3Server) -> ObjectStore:
    return open_store(parse_store_url(s3_server.url), replace(s3_server.settings, list_page_keys=3))


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    made = MAKERS[request.param](request, tmp_path)
    yield made
    await made.aclose()


def _memory(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore()


def _directory(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return DirectoryStore(tmp_path / "store")


def _s3(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return Scoped(request.getfixturevalue("seaweed"), f"{tmp_path.name}/{id(tmp_path)}")


def _gcs(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return Scoped(request.getfixturevalue("google"), f"{tmp_path.name}/{id(tmp_path)}")


def _retrying(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    rng = random.Random(request.node.name)
    repeated = frozenset(Method) - {Method.PUT_IF_ABSENT, Method.PUT_IF_MATCH}
    faults = FaultSchedule(fail_before=0.15, lose_answer=0.15, throttle=0.1, slow=0.1, slow_s=0.01, methods=repeated)
    policy = RetryPolicy(first_s=0.0001, most_s=0.001, deadline_s=FOREVER)
    return Retrying(FaultStore(MemoryStore(), rng, faults), SeededEntropy(rng), policy)


def _scoped(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return Scoped(MemoryStore(), "workspaces/name")


Maker = Callable[[pytest.FixtureRequest, Path], ObjectStore]
MAKERS: dict[str, Maker] = {
    "memory": _memory, "directory": _directory, "s3": _s3, "gcs": _gcs, "retrying": _retrying, "scoped": _scoped,
}  # fmt: skip

A, B = ObjectKey("manifests/00000001"), ObjectKey("manifests/00000002")


async def test_what_is_put_is_read_back(store: ObjectStore) -> None:
    body = random.Random(7).randbytes(300_000)
    written = await store.put(A, body, lane=Lane.BULK)
    stored = await store.get(A, lane=Lane.DEMAND)
    assert stored.body == body
    assert stored.etag == written.etag
    assert written.size_bytes == len(body)


async def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    await store.put(A, b"")
    assert (await store.get(A)).body == b""
    assert (await store.head(A)).size_bytes == 0


async def test_put_replaces(store: ObjectStore) -> None:
    first = await store.put(A, b"one")
    second = await store.put(A, b"two!")
    assert (await store.get(A)).body == b"two!"
    assert first.etag != second.etag


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (3, 4, b"3456"), (9, 1, b"9"), (7, 100, b"789"), (4, None, b"456789"), (0, 10, b"0123456789")],
)
async def test_a_range_gives_what_there_is(store: ObjectStore, start: int, length: int | None, expected: bytes) -> None:
    await store.put(A, b"0123456789")
    assert (await store.get(A, start=start, length=length)).body == expected


@pytest.mark.parametrize("start", [10, 11, 500])
async def test_a_range_beyond_the_end_is_corrupt(store: ObjectStore, start: int) -> None:
    await store.put(A, b"0123456789")
    with pytest.raises(Corrupt):
        await store.get(A, start=start, length=5)


async def test_absent_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        await store.get(A)
    with pytest.raises(NotFound):
        await store.get(A, start=5, length=5)
    with pytest.raises(NotFound):
        await store.head(A)


async def test_create_only_happens_once(store: ObjectStore) -> None:
    await store.put_if_absent(A, b"first")
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent(A, b"second")
    assert (await store.get(A)).body == b"first"


async def test_create_only_meets_a_plain_put(store: ObjectStore) -> None:
    await store.put(A, b"plain")
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent(A, b"second")
    assert (await store.get(A)).body == b"plain"


async def test_a_deleted_key_can_be_created_again(store: ObjectStore) -> None:
    await store.put_if_absent(A, b"first")
    await store.delete([A])
    await store.put_if_absent(A, b"again")
    assert (await store.get(A)).body == b"again"


async def test_of_simultaneous_creates_one_wins(store: ObjectStore) -> None:
    for number in range(3):
        key, winners = ObjectKey(f"race/{number}"), []

        async def rival(body: bytes, key: ObjectKey = key, winners: list[bytes] = winners) -> None:
            try:
                await store.put_if_absent(key, body)
                winners.append(body)
            except PreconditionFailed:
                pass

        async with trio.open_nursery() as nursery:
            for name in range(4):
                nursery.start_soon(rival, f"rival {name}".encode())
        assert len(winners) == 1
        assert (await store.get(key)).body == winners[0]


async def test_put_if_match_replaces_only_what_it_names(store: ObjectStore) -> None:
    first = await store.put(A, b"one")
    second = await store.put_if_match(A, b"two", first.etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match(A, b"stale", first.etag)
    assert (await store.get(A)).body == b"two"
    found = await store.head(A)
    assert found.etag == second.etag
    await store.put_if_match(A, b"three", found.etag)
    assert (await store.get(A)).body == b"three"


async def test_put_if_match_needs_the_object(store: ObjectStore) -> None:
    gone = await store.put(A, b"one")
    await store.delete([A])
    with pytest.raises(PreconditionFailed):
        await store.put_if_match(A, b"two", gone.etag)
    with pytest.raises(NotFound):
        await store.get(A)


async def test_a_listing_is_complete_and_in_order(store: ObjectStore) -> None:
    names = [ObjectKey(f"packs/{number:02x}/{number * 7919 % 256:08x}-pack") for number in range(20)]
    for name in reversed(names):
        await store.put(name, name.encode())
    await store.put(ObjectKey("packs-not/1"), b"")
    await store.put(ObjectKey("hints/1"), b"")
    found = [info async for info in store.list_objects("packs/")]
    assert [info.key for info in found] == names
    assert {info.size_bytes for info in found} == {len(names[0])}
    assert [info.key async for info in store.list_objects("packs/0")] == names[:16]
    assert [info.key async for info in store.list_objects("packs/", after=names[7])] == names[8:]
    assert [info.key async for info in store.list_objects("nothing/")] == []


async def test_a_listing_of_everything_shows_objects_only(store: ObjectStore) -> None:
    await store.put_if_absent(A, b"1")
    await store.put(B, b"2")
    assert [info.key async for info in store.list_objects("")] == [A, B]


async def test_delete_is_for_many_and_for_absent_ones(store: ObjectStore) -> None:
    names = [ObjectKey(f"packs/{number}") for number in range(12)]
    for name in names:
        await store.put(name, b"x")
    await store.delete([*names[:10], ObjectKey("packs/absent"), names[0]])
    assert [info.key async for info in store.list_objects("packs/")] == sorted(names[10:])
    await store.delete([])
    await store.delete([names[0]])


async def test_the_store_tells_its_time(store: ObjectStore) -> None:
    written = await store.put(A, b"x")
    found = await store.head(A)
    got = await store.get(A)
    assert found.modified_s <= got.server_time_s + 1
    assert abs(written.server_time_s - found.modified_s) < 60
    assert [info.modified_s async for info in store.list_objects("")] == [pytest.approx(found.modified_s, abs=1)]


async def test_a_cancelled_request_leaves_the_store_usable(store: ObjectStore) -> None:
    await store.put(A, b"x" * 100_000)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.get(A)
    assert len((await store.get(A)).body) == 100_000


async def test_no_key_climbs_out_of_the_prefix(store: ObjectStore) -> None:
    for key in ("../x", "a/../../x", "/etc/x", "a//b", ""):
        with pytest.raises(AssertionError):
            await store.put(ObjectKey(key), b"x")
