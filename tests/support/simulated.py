"""A simulated market for tests: calm unless the test says otherwise, in virtual time, spoken to over httpx."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import trio

from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import Simulator, simulating

CALM: Mapping[str, Any] = {
    "seed": 7, "rivals_per_hour": 0.0, "busy": 0.0, "drift": 0.0, "limits": False, "call_latency": False,
    "image_cached": 1.0, "outbid_shows_exited": 0.0,
}  # fmt: skip
"""Nothing happens but what the test does."""

KEY = "key-of-the-account"
GPU = "RTX 4090"
GPU_ID = "NVIDIA GeForce RTX 4090"


@dataclass
class Market:
    """A simulator and one account's client."""

    sim: Simulator
    http: httpx.AsyncClient

    async def order(self, **fault: Any) -> dict[str, Any]:
        answer = await self.http.post("/__sim/faults", json=fault)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ask(self, name: str, **query: str) -> Any:
        return (await self.http.get(f"/__sim/{name}", params=query)).json()

    async def offers(self, *, bid: bool = True, **filters: Any) -> list[dict[str, Any]]:
        body = {"type": "bid" if bid else "on-demand", "rentable": {"eq": True}, "gpu_name": {"eq": GPU}, **filters}
        return list((await self.http.post("/api/v0/bundles/", json=body)).json()["offers"])

    async def rent(self, offer: Mapping[str, Any], **fields: Any) -> httpx.Response:
        body = {"image": "some/image:1", "disk": 20, "label": "sw-job-1", "cancel_unavail": True, **fields}
        return await self.http.put(f"/api/v0/asks/{offer['id']}/", json=body)

    async def rented(self, **fields: Any) -> int:
        """Rent the first offer of one GPU as a bid 20 % above the lowest, and return the contract."""
        offer = (await self.offers(num_gpus={"eq": 1}))[0]
        answer = await self.rent(offer, **{"price": offer["min_bid"] * 1.2, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["new_contract"])

    async def row(self, contract: int) -> dict[str, Any] | None:
        found: dict[str, Any] | None = (await self.http.get(f"/api/v0/instances/{contract}/")).json()["instances"]
        return found

    async def status(self, contract: int) -> str | None:
        row = await self.row(contract)
        return "gone" if row is None else row["actual_status"]

    async def until_status(self, contract: int, status: str | None) -> None:
        async def there() -> bool:
            return await self.status(contract) == status

        await until(there)

    async def pod(self, **fields: Any) -> httpx.Response:
        body = {"name": "sw-pod-1", "image": "some/image:1", "gpu": {"id": GPU_ID}, "cloud": "COMMUNITY", **fields}
        return await self.http.post("/v2/pods", json=body)

    async def graph(self, query: str, variables: Mapping[str, Any] | None = None) -> httpx.Response:
        return await self.http.post("/graphql", json={"query": query, "variables": variables or {}})


async def until(there: Callable[[], Awaitable[bool]], *, every_s: float = 1.0, at_most_s: float = 3600.0) -> None:
    """Wait for a condition, in whatever time trio's clock has."""
    with trio.fail_after(at_most_s):
        while not await there():
            await trio.sleep(every_s)


@asynccontextmanager
async def market(**settings: Any) -> AsyncIterator[Market]:
    async with simulating(Scenario(**{**CALM, **settings})) as sim:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=sim.transport, base_url=sim.url, headers=headers, timeout=60) as http:
            yield Market(sim, http)
