"""RunPod's GraphQL, for what REST v2 lacks: spot pods, `terminateAfter`, and the balance (providers.md 2.1).

All of it is on its way out, so nothing here is used before a probe has seen it: the schema is asked whether the input
types still exist, which costs nothing and rents nothing. A server that hides its schema counts as one without them.
Bids are per GPU there and per machine here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import trio

from provisioner.core.errors import ProviderDenied, ProviderRefused, ProviderUnavailable
from provisioner.core.ports import Created, CreateOutcome, CreateRefused, CreateUnknown, Launch, RefusedWhy
from provisioner.providers.http import Answer, Http
from provisioner.providers.reading import mapping, number, text

PATH: Final = "/graphql"
PROBE_FRESH_S: Final = 3600.0

_PROBE: Final = """{
  spot: __type(name: "PodRentInterruptableInput") { inputFields { name } }
  deploy: __type(name: "PodFindAndDeployOnDemandInput") { inputFields { name } }
}"""
_BIDS: Final = """query($id: String!, $count: Int!) { gpuTypes(input: {id: $id}) {
  secure: lowestPrice(input: {gpuCount: $count, secureCloud: true}) { minimumBidPrice }
  community: lowestPrice(input: {gpuCount: $count, secureCloud: false}) { minimumBidPrice }
} }"""
_BALANCE: Final = "{ myself { clientBalance } }"
_DEPLOY: Final = "mutation($input: PodFindAndDeployOnDemandInput!) { podFindAndDeployOnDemand(input: $input) { id } }"
_RENT: Final = "mutation($input: PodRentInterruptableInput!) { podRentInterruptable(input: $input) { id } }"
_RESUME: Final = "mutation($input: PodBidResumeInput!) { podBidResume(input: $input) { id } }"

CAPACITY_WORDS: Final = ("instances available", "not enough free gpus", "could not find any pods", "does not have the")
"""In the texts that mean no capacity; there is no code for it (providers.md 2.1, 2.2)."""
_CREDIT_WORDS: Final = ("balance", "insufficient funds", "credit")
_KEY_WORDS: Final = ("unauthorized", "unauthenticated")
_REMOVED: Final = "cannot query field"


@dataclass(frozen=True, slots=True)
class GraphAbilities:
    """What the probe saw."""

    spot: bool = False
    terminate_after: bool = False
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """What an offer's id of this provider says: where a pod is asked for."""

    cloud: str
    center: str
    """A data centre's id; empty for any."""
    gpu_id: str

    def __str__(self) -> str:
        return f"{self.cloud}/{self.center}/{self.gpu_id}"


def place_of(offer_id: str) -> Place:
    """Read an offer's id.

    >>> place_of(str(Place("SECURE", "EU-SE-1", "NVIDIA L4"))).center
    'EU-SE-1'
    """
    cloud, center, gpu_id = offer_id.split("/", 2)
    return Place(cloud, center, gpu_id)


class Graph:
    """The GraphQL side of one account."""

    def __init__(self, provider: str, http: Http) -> None:
        self._provider = provider
        self._http = http
        self._abilities = GraphAbilities()
        self._probe_again_s = -math.inf

    async def abilities(self) -> GraphAbilities:
        """Probe, or return what was seen within the hour. Only a refused key raises."""
        if trio.current_time() >= self._probe_again_s:
            try:
                data = await self._ask("probe", _PROBE, {})
            except ProviderUnavailable:
                # Not known now: assume nothing, and look again with the next question.
                return GraphAbilities()
            except ProviderRefused:
                data = {}
            self._abilities = GraphAbilities(
                spot="bidPerGpu" in _inputs(data.get("spot")),
                terminate_after="terminateAfter" in _inputs(data.get("deploy")),
                answers=bool(data),
            )
            self._probe_again_s = trio.current_time() + PROBE_FRESH_S
        return self._abilities

    async def min_bids(self, gpu_id: str, count: int) -> Mapping[str, float]:
        """Return the least bid per GPU by cloud, for the clouds that have one."""
        data = await self._ask("search", _BIDS, {"id": gpu_id, "count": count})
        kinds = data.get("gpuTypes")
        found = mapping(kinds[0]) if isinstance(kinds, list) and kinds else {}
        bids = {
            cloud.upper(): number(mapping(found.get(cloud)).get("minimumBidPrice")) for cloud in ("secure", "community")
        }
        return {cloud: bid for cloud, bid in bids.items() if bid is not None}

    async def balance_usd(self) -> float | None:
        """Return the account's balance."""
        return number(mapping((await self._ask("user", _BALANCE, {})).get("myself")).get("clientBalance"))

    async def bid_resume(self, instance_id: str, bid_usd_gpu_h: float, count: int) -> None:
        """Raise a stopped pod's bid and start it."""
        await self._ask(
            "bid", _RESUME, {"input": {"podId": instance_id, "bidPerGpu": bid_usd_gpu_h, "gpuCount": count}}
        )

    async def create(self, launch: Launch, args: str, *, secrets: Collection[str], wait_s_max: float) -> CreateOutcome:
        """Rent, once: a bid as a spot pod, else on demand."""
        order = _order(launch, args)
        query = _DEPLOY
        if launch.bid_usd_h is not None:
            query = _RENT
            order["bidPerGpu"] = round(launch.bid_usd_h / launch.offer.gpu_count, 6)
        body = {"query": query, "variables": {"input": order}}
        answer = await self._http.create(PATH, body, method="POST", secrets=secrets, wait_s_max=wait_s_max)
        return self._outcome(answer) if isinstance(answer, Answer) else answer

    def _outcome(self, answer: Answer) -> CreateOutcome:
        said = f"{self._provider}: create: status {answer.status} ({answer.words})"
        data = mapping(mapping(answer.document).get("data"))
        made = next((text(mapping(pod).get("id")) for pod in data.values() if pod), "")
        words = answer.words.lower()
        if made:
            return Created(made)
        if answer.status == 401 or any(word in words for word in _KEY_WORDS):
            return CreateRefused(RefusedWhy.DENIED, said)
        if answer.status == 402 or any(word in words for word in _CREDIT_WORDS):
            return CreateRefused(RefusedWhy.NO_CREDIT, said)
        if any(word in words for word in CAPACITY_WORDS):
            return CreateRefused(RefusedWhy.NO_CAPACITY, said)
        if _REMOVED in words or answer.status in (404, 410):
            # The mutation is gone: other offers, of the other protocol, may still be had.
            self._probe_again_s = -math.inf
            return CreateRefused(RefusedWhy.NO_CAPACITY, said)
        # 400 is a query that does not fit the schema, found before anything is carried out.
        return CreateRefused(RefusedWhy.BAD_REQUEST, said) if answer.status == 400 else CreateUnknown(said)

    async def _ask(self, endpoint: str, query: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data of a query that may be repeated, or raise."""
        answer = await self._http.ask(endpoint, "POST", PATH, body={"query": query, "variables": dict(variables)})
        said = f"{self._provider}: {endpoint}: status {answer.status} ({answer.words})"
        if any(word in answer.words.lower() for word in _KEY_WORDS):
            raise ProviderDenied(f"{said}: set a valid key")
        if answer.status >= 400 or mapping(answer.document).get("errors"):
            raise ProviderRefused(said)
        return mapping(mapping(answer.document).get("data"))


def _inputs(kind: object) -> set[str]:
    fields = mapping(kind).get("inputFields")
    return {text(mapping(one).get("name")) for one in fields} if isinstance(fields, list) else set()


def _order(launch: Launch, args: str) -> dict[str, Any]:
    place = place_of(launch.offer.offer_id)
    order: dict[str, Any] = {
        "name": launch.label,
        "imageName": launch.image,
        "cloudType": place.cloud,
        "gpuTypeId": place.gpu_id,
        "gpuCount": launch.offer.gpu_count,
        "containerDiskInGb": math.ceil(launch.disk_gb),
        "volumeInGb": 0,
        "dockerArgs": args,
        "env": [{"key": name, "value": value} for name, value in launch.environment.items()],
        "ports": "22/tcp",
        "startSsh": True,
    }
    if place.center:
        order["dataCenterId"] = place.center
    if launch.image_login is not None:
        order["containerRegistryAuthId"] = launch.image_login
    if launch.ends_at_s is not None:
        order["terminateAfter"] = datetime.fromtimestamp(launch.ends_at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return order
