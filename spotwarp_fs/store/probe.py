"""Find out whether a store is fit for writing, by trying it (P-16).

Invariant: a verdict is never drawn from a lost answer. When one is lost the whole probe starts again on fresh keys, so
that the probe's own earlier success is not mistaken for a rule of the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from spotwarp_fs.core.errors import Conflict, NotFound, PreconditionFailed, SpotwarpError, Unavailable, Unsupported
from spotwarp_fs.core.ports import Entropy, ObjectInfo, ObjectStore, Wall
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.limits import DELETE_BATCH_KEYS, Throttled
from spotwarp_fs.store.pacing import Backoff

ROUNDS_MAX: Final = 6
RIVALS: Final = 4
LISTED_KEYS: Final = 5
SKEW_MAX_S: Final = 300.0
PAUSE_MAX_S: Final = 2.0
KEY_WRITE_INTERVAL_S: Final = 1.1
THROTTLED_FIRST_S: Final = 0.1
THROTTLED_MAX: Final = 5
ATTEMPTS_MAX: Final = 20
BODY: Final = bytes(range(256))
SECOND: Final = b"second"
ADVICE: Final = (
    "conditional writes are needed to keep two writers apart. Use a store that has them or, if there will only ever "
    "be one writer, --unsafe-single-writer"
)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found; the first two are what writing needs, the others are facts to know."""

    create_refused_when_present: bool
    one_winner: bool
    stale_match_refused: bool
    ranged_get: bool
    listing_complete: bool
    clock_skew_s: float | None
    """Store's clock minus ours; None when no wall clock was given."""
    rounds: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `doctor` should show though it does not stop a mount."""
        found = []
        if not self.stale_match_refused:
            found.append("ignores If-Match on PUT: hints may overwrite each other")
        if not self.listing_complete:
            found.append("listings miss keys: tools that list will be incomplete")
        if self.clock_skew_s is not None and abs(self.clock_skew_s) > SKEW_MAX_S:
            found.append(f"clock differs from this node's by {self.clock_skew_s:.0f} s: collection will refuse to run")
        return tuple(found)


async def probe(
    store: ObjectStore,
    entropy: Entropy,
    *,
    wall: Wall | None = None,
    small_pages: ObjectStore | None = None,
    thorough: bool = True,
) -> ProbeReport:
    """Try *store* and tell, or raise Unsupported naming what it lacks, or Unavailable when it keeps losing answers.

    *store* must not repeat conditional writes by itself (`Retrying` does not). *small_pages* is the same store with
    pages of two keys, to see listings continued. Without *thorough* only what writing needs is tried, as a mount does;
    the rest is then reported as if it were well.
    Objects below `hints/probe/` are made and removed.
    """
    backoff = Backoff(entropy, first_s=min(0.1, PAUSE_MAX_S), most_s=PAUSE_MAX_S)
    for number in range(1, ROUNDS_MAX + 1):
        this = _Round(store, small_pages or store, thorough, f"hints/probe/{entropy.token_bytes(8).hex()}", number)
        try:
            return await this.run(wall)
        except Unavailable:
            if number == ROUNDS_MAX:
                raise
        finally:
            await this.clean()
        await trio.sleep(backoff.pause_s())
    raise AssertionError("unreachable")


class _Round:
    def __init__(self, store: ObjectStore, small_pages: ObjectStore, thorough: bool, folder: str, number: int) -> None:
        self._store = store
        self._thorough = thorough
        self._small_pages = small_pages
        self._folder = folder
        self._number = number
        self._made: list[ObjectKey] = []

    async def run(self, wall: Wall | None) -> ProbeReport:
        before_ns = wall.now_ns() if wall else 0
        created, refused = await self._create_twice()
        skew_s = None
        if wall is not None:
            middle_s = (before_ns + wall.now_ns()) / 2e9
            skew_s = created.server_time_s - middle_s
        one_winner = await self._rivals()
        return ProbeReport(
            create_refused_when_present=refused,
            one_winner=one_winner,
            ranged_get=await self._range(),
            stale_match_refused=not self._thorough or await self._stale_match(created),
            listing_complete=not self._thorough or await self._listing(),
            clock_skew_s=skew_s,
            rounds=self._number,
        )

    async def clean(self) -> None:
        with trio.move_on_after(10):
            for begin in range(0, len(self._made), DELETE_BATCH_KEYS):
                try:
                    await self._store.delete(self._made[begin : begin + DELETE_BATCH_KEYS])
                except SpotwarpError:
                    return  # a hint left behind harms nobody, and the verdict must not depend on deleting

    def _key(self, name: str) -> ObjectKey:
        key = ObjectKey(f"{self._folder}/{name}")
        if key not in self._made:
            self._made.append(key)
        return key

    async def _create_twice(self) -> tuple[ObjectInfo, bool]:
        key = self._key("create")
        created = await self._create(key)
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._conditional(lambda: self._store.put_if_absent(key, SECOND))
            except PreconditionFailed:
                if await self._one_of(key, BODY, SECOND) == BODY:
                    return created, True
                raise self._lacking("refuses a create-only PUT of an existing key, and yet replaces it") from None
            except Unavailable:
                if await self._one_of(key, BODY, SECOND) == BODY:
                    continue  # the answer was lost and nothing is known: once more
            raise self._lacking("ignores If-None-Match")
        raise Unavailable(f"probe of {self._store.url}: {ATTEMPTS_MAX} answers were lost")

    async def _create(self, key: ObjectKey) -> ObjectInfo:
        """Create *key*, which nobody else draws: what is there is ours, whatever an answer said (C08)."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await self._conditional(lambda: self._store.put_if_absent(key, BODY))
            except (PreconditionFailed, Unavailable) as error:
                with suppress(NotFound):
                    await self._one_of(key, BODY)
                    return await self._store.head(key)
                if attempt == ATTEMPTS_MAX or isinstance(error, PreconditionFailed):
                    raise Unavailable(f"probe of {self._store.url}: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    async def _rivals(self) -> bool:
        for number in range(ATTEMPTS_MAX):
            if await self._race(self._key(f"rivals/{number}")):
                return True
        raise Unavailable(f"probe of {self._store.url}: no rival could create anything in {ATTEMPTS_MAX} races")

    async def _race(self, key: ObjectKey) -> bool:
        """Let rivals create *key* at once; False when all of them lost their answers and nothing was made."""
        winners: list[int] = []
        lost: list[int] = []

        async def rival(number: int) -> None:
            try:
                await self._store.put_if_absent(key, _claim(number))
                winners.append(number)
            except PreconditionFailed:
                return
            except Unavailable:
                lost.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(RIVALS):
                nursery.start_soon(rival, number)
        if len(winners) > 1 or not (winners or lost):
            raise self._lacking(f"gave {len(winners)} winners to {RIVALS} simultaneous creates (If-None-Match)")
        try:
            found = await self._one_of(key, *map(_claim, range(RIVALS)))
        except NotFound:
            if winners:
                raise self._lacking("told a creator that it won, and does not have the object") from None
            return False
        if found not in map(_claim, winners or lost):
            raise self._lacking("told one of simultaneous creators that it won, and kept another's object")
        return True

    async def _stale_match(self, created: ObjectInfo) -> bool:
        key = self._key("create")
        try:
            await _unhurried(lambda: self._store.put_if_match(key, BODY + b"!", created.etag))
        except (PreconditionFailed, Unsupported):
            return False
        except Unavailable:
            return True  # an answer was lost: nothing is said against the store
        try:
            await _unhurried(lambda: self._store.put_if_match(key, b"stale", created.etag))
        except PreconditionFailed:
            return await self._one_of(key, BODY + b"!", b"stale") != b"stale"
        except Unavailable:
            return True
        return False

    async def _range(self) -> bool:
        key = self._key("create")
        if (await self._store.get(key, start=100, length=50)).body != BODY[100:150]:
            raise Unavailable(f"{self._store.url} answers a ranged GET with other bytes: blocks could not be fetched")
        return True

    async def _one_of(self, key: ObjectKey, *bodies: bytes) -> bytes:
        """Read what a PUT of ours made; bytes that nobody wrote say nothing about conditions."""
        found = (await self._store.get(key)).body
        if found not in bodies:
            raise Unavailable(f"{key} in {self._store.url} came back with bytes that nobody wrote")
        return found

    async def _listing(self) -> bool:
        names = [self._key(f"list/{number}") for number in range(LISTED_KEYS)]
        for name in names:
            await self._store.put(name, b"")
        listed = {info.key async for info in self._small_pages.list_objects(f"{self._folder}/list/")}
        return listed == set(names)

    async def _conditional(self, request: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
        try:
            return await _unhurried(request)
        except NotFound as error:
            raise self._lacking("answers 404 to a create-only PUT") from error
        except Unsupported as error:
            raise self._lacking(f"does not implement If-None-Match ({error})") from error

    def _lacking(self, what: str) -> Unsupported:
        return Unsupported(f"store {self._store.url} {what}: {ADVICE}")


def _claim(number: int) -> bytes:
    return bytes([number]) * 16  # no flipped bit makes one rival's claim another's


async def _unhurried(request: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
    """Send *request* again while the store asks for that (409), or wants fewer writes of one key (R2, Google)."""
    for attempt in range(THROTTLED_MAX):
        try:
            return await request()
        except (Throttled, Conflict):
            await trio.sleep(min(THROTTLED_FIRST_S * 2**attempt, KEY_WRITE_INTERVAL_S))
    return await request()
