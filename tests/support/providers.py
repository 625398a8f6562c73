"""Each provider adapter on a bench: Vast and RunPod on a simulated market in virtual time, local as real processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from provisioner.core.gpus import parse_gpu
from provisioner.core.offers import Market, Offer, with_bid
from provisioner.core.ports import Created, Instance, InstanceStatus, Launch, Provider
from provisioner.core.wishes import Wish, sift
from provisioner.providers.local import Local, LocalMachine
from provisioner.providers.runpod import RunPod
from provisioner.providers.vast import Vast
from provisioner.system import SystemClock as SystemClock
from provisioner.system import SystemEntropy as SystemEntropy
from tests.support import simulated
from tests.support.simulated import GPU, KEY, until

SIMULATED = ("vast-spot", "vast-on-demand", "runpod", "runpod-spot")
SERVICES = (*SIMULATED, "local")
SECRET = "s3cret-of-the-job"


@dataclass
class Bench:
    """One adapter, what to ask it for, and the truth behind it."""

    service: str
    provider: Provider
    wish: Wish
    market: simulated.Market | None = None
    base: Path | None = None

    @property
    def endpoint_provider(self) -> str:
        return self.service.split("-")[0]

    @property
    def sim(self) -> simulated.Market:
        assert self.market is not None
        return self.market

    async def order(self, **fault: Any) -> None:
        await self.sim.order(provider=self.endpoint_provider, **fault)

    async def offers(self, **wish: Any) -> list[Offer]:
        asked = replace(self.wish, **wish)
        return list(sift(await self.provider.search(asked), asked, 0.0).accepted)

    async def launch(self, label: str = "sw-job-00c0ffee-1", script: str = "sleep 600", **changes: Any) -> Launch:
        return self.launch_of(with_bid((await self.offers())[0]), label, script, **changes)

    def launch_of(self, offer: Offer, label: str, script: str = "sleep 600", **changes: Any) -> Launch:
        bid_usd_h = offer.price.compute_usd_h if offer.market is Market.SPOT else None
        launch = Launch(label, offer, "some/image:1", 20.0, script, {"TOKEN": SECRET}, bid_usd_h=bid_usd_h)
        return replace(launch, **changes)

    async def rented(self, label: str = "sw-job-00c0ffee-1", **changes: Any) -> str:
        outcome = await self.provider.create(await self.launch(label, **changes))
        assert isinstance(outcome, Created), outcome
        return outcome.instance_id

    async def row(self, instance_id: str) -> Instance | None:
        return next((one for one in await self.provider.list_instances() if one.instance_id == instance_id), None)

    async def until_status(self, instance_id: str, *statuses: InstanceStatus, at_most_s: float = 3600.0) -> Instance:
        found: list[Instance] = []

        async def there() -> bool:
            row = await self.row(instance_id)
            if row is not None and row.status in statuses:
                found.append(row)
            return bool(found)

        await until(there, every_s=0.05 if self.market is None else 2.0, at_most_s=at_most_s)
        return found[0]

    async def alive(self) -> list[str]:
        """Name what really exists and costs money."""
        if self.market is not None:
            return [str(one["id"]) for one in await self.market.ask("alive")]
        assert self.base is not None
        return sorted(path.name for path in self.base.glob("*") if path.is_dir())

    async def sent(self, label: str) -> int:
        """Count the creates that were sent with *label*."""
        return int((await self.sim.ask("creates")).get(label, {"sent": 0})["sent"])


@asynccontextmanager
async def bench_of(service: str, tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    wish = Wish(parse_gpu(GPU), disk_gb=20.0, on_demand_max_usd_gpu_h=None if service.endswith("spot") else 100.0)
    wish = replace(wish, spot=service.endswith("spot") or service == "local")
    if service == "local":
        base = tmp_path / "nodes"
        local = Local(base, clock=SystemClock(), entropy=SystemEntropy(), machine=LocalMachine())
        try:
            yield Bench(service, local, replace(wish, gpu=parse_gpu("CPU")), base=base)
        finally:
            with trio.CancelScope(shield=True):
                for instance in await local.list_instances():
                    await local.destroy(instance.instance_id)
        return
    async with simulated.market(**{"limits": True, "runpod_spot": service == "runpod-spot", **settings}) as m:
        make = Vast if service.startswith("vast") else RunPod
        adapter: Provider = make(KEY, base_url=m.sim.url, transport=m.sim.transport)
        try:
            yield Bench(service, adapter, wish, market=m)
            assert await m.ask("violations") == []
        finally:
            await adapter.aclose()


Body = Callable[..., Awaitable[None]]


def on(*services: str, **settings: Any) -> Callable[[Body], Callable[..., None]]:
    """Run an async test on the bench of each service: simulated ones in virtual time, local ones in real time.

    What the test takes besides the bench comes from pytest, as usual.
    """

    def decorate(body: Body) -> Callable[..., None]:
        def test(service: str, tmp_path: Path, **given: Any) -> None:
            async def main() -> None:
                async with bench_of(service, tmp_path, **settings) as bench:
                    await body(bench, **given)

            clock = None if service == "local" else MockClock(autojump_threshold=0)
            trio.run(main, clock=clock)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("service", "tmp_path")]
        taken = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in inspect.signature(body).parameters.values()
        ]
        test.__signature__ = inspect.Signature([*own, *taken[1:]])  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize("service", services)(test)
        return marked

    return decorate


each = functools.partial(on, *SERVICES)
each_simulated = functools.partial(on, *SIMULATED)
