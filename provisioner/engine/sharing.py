"""Several jobs on one machine: one poll and one limit per account, through small files in the state directory.

    <state>/accounts/<name>.listing   the newest listing of the account, or why there is none; JSON
    <state>/accounts/<name>.<call>    when the next such call may be sent
    …                       .lock     flock, held while a listing is asked for, or a turn is taken

Invariant: a listing keeps the time at which its request was sent, whoever reads it; a turn that was taken is kept even
when its process dies, so limits hold across all processes. Nothing here decides: what is lost is asked for again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import trio

from provisioner.core.errors import ProviderDenied, ProviderUnavailable, ProvisionerError, RateLimited
from provisioner.core.gpus import Gpu
from provisioner.core.offers import Market, Offer
from provisioner.core.ports import (
    Capabilities,
    Clock,
    CreateOutcome,
    CreateRefused,
    Instance,
    InstanceStatus,
    Launch,
    Provider,
    RefusedWhy,
    SshAddress,
)
from provisioner.core.wishes import Wish
from provisioner.engine.ports import Listing

LOCK_POLL_S: Final = 0.1
CREATE_WAIT_S: Final = 25.0
"""How long a create may wait for its turn among all jobs; after that its offer is stale, and it says so."""
# The longest gaps that a provider documents (Vast's: providers.md 1.6), with a quarter of a second for the network.
SEARCH_GAP_S: Final = 6.75
DESTROY_GAP_S: Final = 3.25
BID_GAP_S: Final = 5.75
_FAILURES: Final = {kind.__name__: kind for kind in (ProviderUnavailable, ProviderDenied)}


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold the lock of *path*; waiting for it never blocks the loop."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await trio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, document: object) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(document))
    fresh.replace(path)


def _read(path: Path) -> Any:
    """Return what was written, or None; a file that cannot be read counts as none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


class SharedListings:
    """`ports.Listings` for all jobs of this machine."""

    def __init__(self, state: Path, clock: Clock) -> None:
        self._directory = state / "accounts"
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clock = clock

    async def listing(self, provider: Provider, fresh_s: float) -> Listing:
        """Return what another job just got, or ask and leave it to the others; a failure is shared as well."""
        path = self._directory / f"{provider.name}.listing"
        found = self._fresh(path, fresh_s)
        if found is not None:
            return found
        async with _locked(path):
            found = self._fresh(path, fresh_s)
            if found is not None:
                return found
            asked_at_s = self._clock.now_s()
            try:
                instances = tuple(await provider.list_instances())
            except ProvisionerError as error:
                retry_after_s = error.retry_after_s if isinstance(error, RateLimited) else None
                failure = {"kind": type(error).__name__, "text": str(error), "retry_after_s": retry_after_s}
                _write(path, {"asked_at_s": asked_at_s, "failure": failure})
                raise
            _write(path, {"asked_at_s": asked_at_s, "instances": [_plain(one) for one in instances]})
            return Listing(asked_at_s, instances)

    def _fresh(self, path: Path, fresh_s: float) -> Listing | None:
        document = _read(path)
        try:
            asked_at_s = float(document["asked_at_s"])
            if not 0.0 <= self._clock.now_s() - asked_at_s <= fresh_s:
                return None
            failure = document.get("failure")
            if failure is None:
                return Listing(asked_at_s, tuple(_instance(one) for one in document["instances"]))
        except (ValueError, KeyError, TypeError):
            return None
        if failure["kind"] == RateLimited.__name__:
            raise RateLimited(failure["text"], failure["retry_after_s"])
        raise _FAILURES.get(failure["kind"], ProviderUnavailable)(failure["text"])


def _plain(instance: Instance) -> dict[str, Any]:
    market = None if instance.market is None else instance.market.value
    return {**asdict(instance), "status": instance.status.value, "market": market}


def _instance(document: dict[str, Any]) -> Instance:
    gpu, ssh, market = document["gpu"], document["ssh"], document["market"]
    return Instance(
        **{
            **document,
            "status": InstanceStatus(document["status"]),
            "market": None if market is None else Market(market),
            "gpu": None if gpu is None else Gpu(**gpu),
            "ssh": None if ssh is None else SshAddress(**ssh),
        }
    )


class SharedAccount:
    """A provider whose calls keep their gaps among all jobs of this machine. Also `ports.Rebids` where it is."""

    def __init__(self, provider: Provider, state: Path, clock: Clock) -> None:
        self._provider = provider
        self._directory = state / "accounts"
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clock = clock

    @property
    def name(self) -> str:
        """As in `--providers`."""
        return self._provider.name

    async def capabilities(self) -> Capabilities:
        """Say what the service can do."""
        return await self._provider.capabilities()

    async def search(self, wish: Wish) -> Sequence[Offer]:
        """Search, in turn with the other jobs."""
        await self._turn("search", SEARCH_GAP_S)
        return await self._provider.search(wish)

    async def create(self, launch: Launch) -> CreateOutcome:
        """Send *launch* exactly once, in turn with the other jobs; one whose turn is too far off is not sent."""
        gap_s = (await self._provider.capabilities()).create_gap_s
        if not await self._turn("create", gap_s, CREATE_WAIT_S):
            why = f"{self.name}: create: not sent, other jobs of this machine have its turns"
            return CreateRefused(RefusedWhy.RATE_LIMITED, why)
        return await self._provider.create(launch)

    async def list_instances(self) -> Sequence[Instance]:
        """List; `SharedListings` is what shares the answer."""
        return await self._provider.list_instances()

    async def show(self, instance_id: str) -> Instance | None:
        """Show one instance."""
        return await self._provider.show(instance_id)

    async def destroy(self, instance_id: str) -> None:
        """Destroy, in turn with the other jobs."""
        await self._turn("destroy", DESTROY_GAP_S)
        await self._provider.destroy(instance_id)

    async def rebid(self, instance_id: str, bid_usd_h: float) -> None:
        """Raise a bid, in turn with the other jobs."""
        await self._turn("bid", BID_GAP_S)
        await self._provider.rebid(instance_id, bid_usd_h)  # type: ignore[attr-defined]

    async def balance_usd(self) -> float | None:
        """Return the account's balance."""
        return await self._provider.balance_usd()

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._provider.aclose()

    async def _turn(self, call: str, gap_s: float, wait_s_max: float = float("inf")) -> bool:
        """Wait for this call's turn and take it; False at once when it is further off than *wait_s_max*."""
        capabilities = await self._provider.capabilities()
        if capabilities.create_gap_s == 0.0:
            # A provider that limits nothing (this machine itself).
            return True
        path = self._directory / f"{self.name}.{call}"
        async with _locked(path):
            now_s = self._clock.now_s()
            next_s = _read(path)
            # A clock that was set back must not close an account for ever.
            ahead_s = next_s - now_s if isinstance(next_s, float) else 0.0
            wait_s = ahead_s if 0.0 < ahead_s < 1000 * gap_s else 0.0
            if wait_s > wait_s_max:
                return False
            _write(path, now_s + wait_s + gap_s)
        await trio.sleep(wait_s)
        return True
