"""What the S3 adapter makes of servers and networks that misbehave, each as users have reported it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from spotwarp_fs.core.errors import (
    Conflict,
    Denied,
    ExitCode,
    NotFound,
    PreconditionFailed,
    SpotwarpError,
    StoreRefused,
    Unavailable,
    Unsupported,
)
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.limits import Answered, Throttled
from spotwarp_fs.store.urls import StoreSettings, open_store, parse_store_url
from tests.support.faulty_s3 import ALWAYS, faulty_s3
from tests.support.tiny_s3 import World

A, B = ObjectKey("a"), ObjectKey("b")
KEYS = StoreSettings(access_key_id="first", secret_access_key="s", list_page_keys=2)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, World]]:
    with faulty_s3() as served:
        yield served


@pytest.fixture
def world(server: tuple[str, World]) -> World:
    world = server[1]
    for kept in (world.objects, world.requests, world.access_ids, world.modes):
        kept.clear()
    return world


@pytest.fixture
async def store(server: tuple[str, World], world: World) -> AsyncIterator[ObjectStore]:
    made = open_store(parse_store_url(f"s3://bucket/w?endpoint={server[0]}"), KEYS)
    yield made
    await made.aclose()


ANSWERS = [
    ("slow_down", Throttled, "SlowDown"),
    ("html_502", Answered, "502"),
    ("html_404", Unavailable, "404"),
    ("down", Unavailable, "ConnectionClosed"),
    ("denied", Denied, "AccessDenied.*must be allowed to get, put, list and delete"),
    ("expired", Denied, "ExpiredToken.*get new credentials"),
    ("unknown_bucket", StoreRefused, "create the bucket"),
]


@pytest.mark.parametrize(("mode", "kind", "words"), ANSWERS)
async def test_each_answer_has_one_meaning(
    store: ObjectStore, world: World, mode: str, kind: type[SpotwarpError], words: str
) -> None:
    await store.put(A, b"x")
    calls: list[Callable[[], object]] = [
        lambda: store.get(A),
        lambda: store.put(A, b"y"),
        lambda: store.put_if_absent(B, b"y"),
        lambda: store.delete([A]),
        lambda: anext(aiter(store.list_objects(""))),
    ]
    for call in calls:
        world.modes[mode] = 1
        with pytest.raises(kind, match=words) as caught:
            await call()  # type: ignore[misc]
        assert type(caught.value) is kind
        assert "bucket" in str(caught.value)
        assert world.modes[mode] == 0, "sent once: no retries below the port"


@pytest.mark.promise("P-09")
@pytest.mark.parametrize("mode", ["slow_down", "html_502", "html_404", "down", "denied", "expired", "unknown_bucket"])
async def test_a_failing_store_is_never_not_found(store: ObjectStore, world: World, mode: str) -> None:
    world.modes[mode] = ALWAYS
    for call in (store.get, store.head):
        with pytest.raises(SpotwarpError) as caught:
            await call(A)
        assert not isinstance(caught.value, NotFound)


async def test_a_missing_bucket_is_a_mistake_in_the_settings(store: ObjectStore, world: World) -> None:
    world.modes["unknown_bucket"] = ALWAYS
    with pytest.raises(StoreRefused) as caught:
        await store.head(A)
    assert caught.value.exit_code is ExitCode.CONFIG


async def test_clocks_that_differ_are_both_told(store: ObjectStore, world: World) -> None:
    world.modes |= {"skewed": 1, "skew": 86_400.0}
    with pytest.raises(Denied, match=r"store \S+T\S+Z, this node \S+T\S+Z"):
        await store.get(A)


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        lonely = open_store(parse_store_url(f"s3://bucket?endpoint=http://127.0.0.1:{taken.getsockname()[1]}"), KEYS)
        with pytest.raises(Unavailable):
            await lonely.get(A)
        await lonely.aclose()


@pytest.mark.parametrize("mode", ["empty_body", "short_body"])
@pytest.mark.parametrize(("start", "length"), [(0, None), (0, 100), (100, 500), (900, 500)])
async def test_a_short_body_is_never_given(
    store: ObjectStore, world: World, mode: str, start: int, length: int | None
) -> None:
    await store.put(A, bytes(range(250)) * 4)
    world.modes[mode] = 1
    with pytest.raises(Unavailable):
        await store.get(A, start=start, length=length)
    got = await store.get(A, start=start, length=length)
    assert got.body == (bytes(range(250)) * 4)[start:][:length]


async def test_a_server_that_ignores_ranges_is_cut_to_size(store: ObjectStore, world: World) -> None:
    await store.put(A, b"0123456789")
    world.modes["ignore_range"] = 2
    assert (await store.get(A, start=3, length=4)).body == b"3456"
    assert (await store.get(A)).body == b"0123456789"


async def test_an_empty_answer_to_an_ignored_range_is_not_an_empty_object(store: ObjectStore, world: World) -> None:
    await store.put(A, b"0123456789")
    world.modes |= {"ignore_range": 1, "empty_body": 1}
    with pytest.raises(Unavailable):
        await store.get(A)


async def test_an_upload_counts_only_with_an_etag(store: ObjectStore, world: World) -> None:
    world.modes["no_etag"] = 1
    with pytest.raises(Unavailable, match="ETag"):
        await store.put(A, b"x")


@pytest.mark.history("H19")
async def test_a_create_whose_answer_is_lost_is_not_sent_again(store: ObjectStore, world: World) -> None:
    world.modes["lost_put"] = 1
    with pytest.raises(Unavailable):
        await store.put_if_absent(A, b"mine")
    assert world.asked("PUT") == 1
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent(A, b"mine")
    assert (await store.get(A)).body == b"mine"


async def test_409_asks_for_the_same_again(store: ObjectStore, world: World) -> None:
    world.modes["conflict"] = 1
    with pytest.raises(Conflict):
        await store.put_if_absent(A, b"mine")
    await store.put_if_absent(A, b"mine")


async def test_conditions_that_are_not_implemented(store: ObjectStore, world: World) -> None:
    world.modes["no_conditions"] = ALWAYS
    with pytest.raises(Unsupported, match="If-None-Match"):
        await store.put_if_absent(A, b"x")
    with pytest.raises(Unsupported, match="If-Match"):
        await store.put_if_match(A, b"x", "e")


async def test_a_truncated_page_without_a_token_is_no_end(store: ObjectStore, world: World) -> None:
    for name in "abcde":
        await store.put(ObjectKey(f"list/{name}"), b"")
    world.modes["no_token"] = 1
    found: list[ObjectKey] = []

    async def read_on() -> None:
        async for info in store.list_objects("list/"):
            found.append(info.key)

    with pytest.raises(Unavailable, match="truncated"):
        await read_on()
    assert found == ["list/a", "list/b"]


@pytest.mark.parametrize("mode", ["no_bulk", "wants_md5"])
async def test_deletes_reach_stores_that_refuse_bulk(store: ObjectStore, world: World, mode: str) -> None:
    names = [ObjectKey(f"packs/{number}") for number in range(10)]
    for name in names:
        await store.put(name, b"x")
    world.modes[mode] = ALWAYS
    await store.delete(names)
    assert not world.objects
    assert world.asked("DELETE") == (10 if mode == "no_bulk" else 0)
    await store.delete(names)
    assert world.asked("POST") == (1 if mode == "no_bulk" else 2), "a refusal is remembered"


async def test_deletes_that_fail_are_reported(store: ObjectStore, world: World) -> None:
    await store.put(A, b"x")
    await store.put(B, b"x")
    world.modes["delete_errors"] = 1
    with pytest.raises(Unavailable, match=r"1 of 2 failed, first w/a: InternalError"):
        await store.delete([A, B])


async def test_new_keys_in_the_credentials_file_are_taken_up(
    server: tuple[str, World], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("AWS_") and "FILE" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(parse_store_url(f"s3://bucket/w?endpoint={server[0]}"))
    with pytest.raises(Denied, match="credentials"):
        await store.get(A)
    _write_keys(file, "old")
    await store.put(A, b"one")
    world.modes["old"] = ALWAYS
    with pytest.raises(Denied, match="InvalidAccessKeyId"):
        await store.put(A, b"two")
    for half_written in ("", "[default\naws_acc"):
        file.write_text(half_written)
        with pytest.raises(Denied):
            await store.put(A, b"two")
    _write_keys(file, "new")
    await store.put(A, b"two")
    assert world.access_ids[-1] == "new"
    await store.aclose()


async def test_new_keys_in_the_environment_are_looked_up_after_a_refusal(
    server: tuple[str, World], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setattr("spotwarp_fs.store.s3_clients.CREDENTIAL_REFRESH_S", 0.0)
    store = open_store(parse_store_url(f"s3://bucket/w?endpoint={server[0]}"))
    await store.put(A, b"one")
    world.modes["old"] = ALWAYS
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    with pytest.raises(Denied):
        await store.put(A, b"two")
    await store.put(A, b"two")
    assert world.access_ids[-1] == "new"
    await store.aclose()


async def test_odd_buckets_and_prefixes(server: tuple[str, World], world: World) -> None:
    for place in ("my.team.ws/runs/[gpu] a+b", "ws/100%25 & more/ü", "ws/what?is=this"):
        store = open_store(parse_store_url(f"s3://{place}?endpoint={server[0]}"), KEYS)
        await store.put_if_absent(A, b"x")
        await store.put_if_absent(B, b"x")
        assert (await store.get(A)).body == b"x"
        prefix = place.partition("/")[2]
        assert f"{prefix}/a" in world.objects
        assert [info.key async for info in store.list_objects("")] == [A, B]
        await store.delete([A, B])
        assert not world.objects
        await store.aclose()


@pytest.mark.history("H1")
async def test_a_lane_full_of_hung_requests_delays_no_other(server: tuple[str, World], world: World) -> None:
    store = open_store(parse_store_url(f"s3://bucket/w?endpoint={server[0]}"), KEYS)
    await store.put(A, b"x")
    released = threading.Event()
    threads = store._threads  # type: ignore[attr-defined]
    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(threads.run, Lane.BULK, released.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert (await store.get(A, lane=Lane.DEMAND)).body == b"x"
        await store.put_if_absent(B, b"x", lane=Lane.CONTROL)
        released.set()
    await store.aclose()


def _write_keys(file: Path, name: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key=s\n")
    beside.replace(file)
