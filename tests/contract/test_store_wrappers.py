"""Patience, pace and the probe: what is repeated, what never is, and what a verdict is drawn from."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from spotwarp_fs.core.errors import Denied, PreconditionFailed, Unavailable, Unsupported
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.limits import Answered, Throttled
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.pacing import AdaptiveLimit
from spotwarp_fs.store.probe import probe
from spotwarp_fs.store.retry import Retrying, RetryPolicy
from spotwarp_fs.store.single_writer import UnsafeSingleWriter
from spotwarp_fs.store.urls import StoreSettings, open_store, parse_store_url
from tests.support.faulty_s3 import ALWAYS, faulty_s3
from tests.support.gcs_server import ACCESS_ID, SECRET, gcs_server
from tests.support.s3_server import S3Server

A = ObjectKey("a")


@dataclass
class Seeded:
    rng: random.Random

    def token_bytes(self, count: int) -> bytes:
        return self.rng.randbytes(count)


@dataclass
class FixedWall:
    now_s: float

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20)


@pytest.fixture
def entropy(rng: random.Random) -> Seeded:
    return Seeded(rng)


class Scripted(MemoryStore):
    """A store whose next answers are set beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self.calls = 0

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self._answer()
        return await super().put(key, body, lane=lane)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self._answer()
        return await super().put_if_absent(key, body, lane=lane)

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self._answer()
        return await super().put_if_match(key, body, etag, lane=lane)

    def _answer(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


async def test_what_is_idempotent_is_repeated(entropy: Seeded, autojump_clock: MockClock) -> None:
    inner = Scripted()
    inner.errors = [Unavailable("x"), Throttled("x"), Unavailable("x")]
    await Retrying(inner, entropy).put(A, b"x")
    assert inner.calls == 4


@pytest.mark.history("H19")
async def test_conditional_writes_are_sent_once(entropy: Seeded, autojump_clock: MockClock) -> None:
    inner = Scripted()
    store = Retrying(inner, entropy)
    for error in (Unavailable("x"), Throttled("x"), Denied("x")):
        inner.errors, inner.calls = [error], 0
        with pytest.raises(type(error)):
            await store.put_if_absent(A, b"x", lane=Lane.BULK)
        assert inner.calls == 1
        inner.errors = [error]
        with pytest.raises(type(error)):
            await store.put_if_match(A, b"x", "e", lane=Lane.BULK)
        assert inner.calls == 2


async def test_patience_ends_at_the_deadline(entropy: Seeded, autojump_clock: MockClock) -> None:
    inner = Scripted()
    inner.errors = [Unavailable("last words") for _ in range(1000)]
    began_s = trio.current_time()
    with pytest.raises(Unavailable, match="last words"):
        await Retrying(inner, entropy).within(30).put(A, b"x")
    assert 15 < trio.current_time() - began_s <= 30
    assert 5 < inner.calls < 30


async def test_a_request_that_hangs_ends_at_the_deadline(
    entropy: Seeded, rng: random.Random, autojump_clock: MockClock
) -> None:
    inner = FaultStore(MemoryStore(), rng)
    inner.dead = True
    began_s = trio.current_time()
    with pytest.raises(Unavailable, match="no answer within 7 s"):
        await Retrying(inner, entropy).within(7).get(A)
    assert trio.current_time() - began_s == pytest.approx(7)


async def test_refused_credentials_are_tried_slowly_and_not_for_long(
    entropy: Seeded, autojump_clock: MockClock
) -> None:
    inner = Scripted()
    inner.errors = [Denied("x"), Denied("x")]
    began_s = trio.current_time()
    await Retrying(inner, entropy).put(A, b"x")
    assert trio.current_time() - began_s >= 1
    inner.errors, inner.calls = [Denied("x") for _ in range(100)], 0
    with pytest.raises(Denied):
        await Retrying(inner, entropy).put(A, b"x")
    assert inner.calls < 20


async def test_a_listing_goes_on_where_it_broke_off(
    entropy: Seeded, rng: random.Random, autojump_clock: MockClock
) -> None:
    memory = MemoryStore()
    names = [ObjectKey(f"packs/{number:03}") for number in range(200)]
    for name in names:
        await memory.put(name, b"")
    faulty = FaultStore(memory, rng, FaultSchedule(fail_before=0.2))
    found = [info.key async for info in Retrying(faulty, entropy).list_objects("packs/")]
    assert found == names
    assert faulty.counts["fail_before"] > 20


async def test_a_store_that_answers_with_errors_is_asked_for_longer(entropy: Seeded, autojump_clock: MockClock) -> None:
    policy = RetryPolicy(most_s=1.0, deadline_s=8, answering_deadline_s=20, denied_deadline_s=4)
    waited: dict[type[Exception], float] = {}
    for kind in (Unavailable, Answered, Throttled, Denied):
        store = Retrying(_Failing(kind), entropy, policy)
        began_s = trio.current_time()
        with pytest.raises(kind):
            await store.get(A)
        waited[kind] = trio.current_time() - began_s
    assert 7 <= waited[Unavailable] < 8
    assert 3 <= waited[Denied] < 4
    assert 19 <= waited[Answered] < 20
    assert 19 <= waited[Throttled] < 20


class _Failing(MemoryStore):
    """Fails every read in one way."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self._kind = kind

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        raise self._kind("x")


async def test_the_refused_share_falls(entropy: Seeded, autojump_clock: MockClock) -> None:
    async def refused_share(pace: AdaptiveLimit) -> float:
        server = _Busy(at_once_max=2)
        hasty = RetryPolicy(first_s=0.001, most_s=0.001, deadline_s=3600)
        store = Retrying(server, entropy, hasty, pace=pace)

        async def upload(worker: int) -> None:
            for number in range(60):
                await store.put(ObjectKey(f"{worker}/{number}"), b"x", lane=Lane.BULK)

        async with trio.open_nursery() as nursery:
            for worker in range(8):
                nursery.start_soon(upload, worker)
        return sum(server.refused) / len(server.refused)

    assert await refused_share(AdaptiveLimit(8)) < 0.2 * await refused_share(_Stubborn(8))


async def test_pace_recovers_and_forgets_no_waiter(entropy: Seeded, autojump_clock: MockClock) -> None:
    pace = AdaptiveLimit(8)
    with pytest.raises(Throttled):
        async with pace.slot():
            raise Throttled("x")
    assert pace.allowed == 4

    async def use() -> None:
        async with pace.slot():
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(use)
            if number % 3 == 0:
                with trio.move_on_after(0.001):
                    await use()
    assert pace.allowed == 8


async def test_demand_is_not_paced(entropy: Seeded, autojump_clock: MockClock) -> None:
    pace = AdaptiveLimit(1)
    store = Retrying(MemoryStore(), entropy, pace=pace)
    async with pace.slot():
        with trio.fail_after(1):
            await store.put(A, b"x", lane=Lane.DEMAND)
            await store.put(A, b"x", lane=Lane.CONTROL)


async def test_the_same_seed_gives_the_same_faults() -> None:
    async def world(seed: int) -> tuple[list[str], dict[str, int]]:
        faulty = FaultStore(MemoryStore(), random.Random(seed), FaultSchedule(fail_before=0.3, lose_answer=0.3))
        story = []
        for number in range(50):
            try:
                await faulty.put_if_absent(ObjectKey(f"{number % 20}"), b"x")
                story.append("ok")
            except (Unavailable, PreconditionFailed) as error:
                story.append(str(error))
        return story, faulty.counts

    assert await world(1) == await world(1)
    assert await world(1) != await world(2)


async def test_faults_are_what_they_say(rng: random.Random) -> None:
    memory = MemoryStore()
    faulty = FaultStore(memory, rng)
    faulty.schedule = FaultSchedule(fail_before=1)
    with pytest.raises(Unavailable):
        await faulty.put(A, b"x")
    assert [info async for info in memory.list_objects("")] == []
    faulty.schedule = FaultSchedule(lose_answer=1)
    with pytest.raises(Unavailable):
        await faulty.put(A, bytes(100))
    assert len((await memory.get(A)).body) == 100
    faulty.schedule = FaultSchedule(flip_bit=1)
    flipped = int.from_bytes((await faulty.get(A)).body, "big")
    assert flipped.bit_count() == 1
    faulty.schedule = FaultSchedule(short_body=1)
    assert len((await faulty.get(A)).body) < 100
    faulty.schedule = FaultSchedule(throttle=1, methods=frozenset({Method.HEAD}))
    await faulty.get(A)
    with pytest.raises(Throttled):
        await faulty.head(A)
    faulty.partitioned = True
    with pytest.raises(Unavailable):
        await faulty.get(A)


@pytest.mark.promise("P-16")
async def test_the_probe_passes_a_store_that_is_fit(entropy: Seeded, s3_server: S3Server) -> None:
    url = parse_store_url(s3_server.url)
    store = open_store(url, s3_server.settings)
    paged = open_store(url, StoreSettings(**_fields(s3_server.settings) | {"list_page_keys": 2}))
    report = await probe(store, entropy, wall=FixedWall(0), small_pages=paged)
    assert (report.create_refused_when_present, report.one_winner, report.stale_match_refused) == (True, True, True)
    assert (report.ranged_get, report.listing_complete, report.rounds) == (True, True, 1)
    assert report.clock_skew_s is not None
    assert report.clock_skew_s > 1e9
    assert len(report.warnings) == 1
    assert [info async for info in store.list_objects("")] == [], "it cleans up after itself"
    await store.aclose()
    await paged.aclose()


@pytest.mark.promise("P-16")
async def test_the_probe_passes_google(entropy: Seeded) -> None:
    with gcs_server(key_interval_s=0.1) as (endpoint, world):
        settings = StoreSettings(access_key_id=ACCESS_ID, secret_access_key=SECRET)
        store = open_store(parse_store_url(f"gs://bucket/p?endpoint={endpoint}"), settings)
        report = await probe(store, entropy)
        assert report.stale_match_refused
        assert not world.objects
        await store.aclose()


@pytest.mark.promise("P-16")
@pytest.mark.parametrize(
    ("mode", "words"),
    [("ignore_conditions", "ignores If-None-Match"), ("no_conditions", "does not implement If-None-Match")],
)
async def test_the_probe_refuses_a_store_without_conditional_writes(entropy: Seeded, mode: str, words: str) -> None:
    async with _faulty() as (store, world):
        world.modes[mode] = ALWAYS
        with pytest.raises(Unsupported, match=words) as caught:
            await probe(store, entropy)
        assert "--unsafe-single-writer" in str(caught.value)
        assert not world.objects
        single = UnsafeSingleWriter(store)
        made = await single.put_if_absent(A, b"1")
        with pytest.raises(PreconditionFailed):
            await single.put_if_absent(A, b"2")
        made = await single.put_if_match(A, b"2", made.etag)
        with pytest.raises(PreconditionFailed):
            await single.put_if_match(A, b"3", "stale")


@pytest.mark.promise("P-16")
@pytest.mark.parametrize("mode", ["lost_put", "conflict", "down", "html_502", "slow_down"])
async def test_lost_answers_lead_to_no_verdict(entropy: Seeded, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotwarp_fs.store.probe.KEY_WRITE_INTERVAL_S", 0.01)
    monkeypatch.setattr("spotwarp_fs.store.probe.PAUSE_MAX_S", 0.01)
    async with _faulty() as (store, world):
        for first_turn in (0, 1, 3, 5, 6):
            world.modes |= {mode: 2, f"{mode}_after": first_turn}
            report = await probe(store, entropy)
            assert report.create_refused_when_present
            assert report.one_winner
            assert report.stale_match_refused
            assert world.modes[mode] == 0


async def test_wrong_bytes_on_the_way_back_are_no_verdict(entropy: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotwarp_fs.store.probe.PAUSE_MAX_S", 0.01)
    async with _faulty() as (store, world):
        for first_turn in range(4):
            world.modes |= {"flipped_byte": 1, "flipped_byte_after": first_turn}
            assert (await probe(store, entropy)).rounds == 2
        world.modes["flipped_byte"] = ALWAYS
        with pytest.raises(Unavailable):
            await probe(store, entropy)


async def test_a_store_that_never_answers_is_not_called_unfit(entropy: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotwarp_fs.store.probe.PAUSE_MAX_S", 0.01)
    async with _faulty() as (store, world):
        world.modes["lost_put"] = ALWAYS
        with pytest.raises(Unavailable):
            await probe(store, entropy)


class _Stubborn(AdaptiveLimit):
    def _throttled(self) -> None:
        pass


class _Busy(MemoryStore):
    """A store that refuses what is more than it can do at once."""

    def __init__(self, *, at_once_max: int) -> None:
        super().__init__()
        self._at_once_max = at_once_max
        self._running = 0
        self.refused: list[bool] = []

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        refused = self._running >= self._at_once_max
        self.refused.append(refused)
        if refused:
            await trio.sleep(0.01)
            raise Throttled("SlowDown")
        self._running += 1
        await trio.sleep(0.05)
        self._running -= 1
        return await super().put(key, body, lane=lane)


class _faulty:
    async def __aenter__(self) -> tuple[ObjectStore, object]:
        self._server = faulty_s3()
        endpoint, world = self._server.__enter__()
        settings = StoreSettings(access_key_id="k", secret_access_key="s")
        self._store = open_store(parse_store_url(f"s3://bucket/p?endpoint={endpoint}"), settings)
        return self._store, world

    async def __aexit__(self, *_: object) -> None:
        await self._store.aclose()
        self._server.__exit__(None, None, None)


def _fields(settings: StoreSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}
