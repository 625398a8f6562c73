"""Vast.ai over its REST API (providers.md, section 1): bids and on-demand, pages, and the refusals that hide things.

A create always sets `cancel_unavail`, or a taken offer would leave a contract that starts, and bills, some day. A bid
is sent as `price`; without one Vast rents on demand, silently, so what was rented is read back from the listing
(`Instance.market`, `Instance.usd_h`). The script is the container's command (`args`), which replaces nothing and
needs no sshd (dstack's recipe, providers.md 1.3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from provisioner.core.errors import NoCredit, ProviderDenied, ProviderRefused, ProviderUnavailable
from provisioner.core.gpus import models_of
from provisioner.core.offers import Fuse, Market, Offer
from provisioner.core.ports import (
    Capabilities,
    Created,
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    DeadMan,
    Instance,
    Launch,
    RefusedWhy,
)
from provisioner.core.timing import BOOT_VAST
from provisioner.core.wishes import Wish
from provisioner.providers.gates import Gate
from provisioner.providers.http import Answer, Http
from provisioner.providers.reading import mapping, number, rows, text
from provisioner.providers.vast_rows import instance_of, offer_of

BASE_URL: Final = "https://console.vast.ai"
# Documented minimum intervals (providers.md 1.6), and a quarter of a second for what the network adds or takes away.
_SLACK_S: Final = 0.25
_INTERVALS_S: Final = {"create": 4.5, "list": 1.0, "show": 2.0, "destroy": 3.0, "bid": 5.5, "state": 1.0, "user": 1.0}
_SEARCHES, _SEARCH_WINDOW_S = 9, 60.0
CREATE_PENALTY_S: Final = 12.0
"""How long a create that came too early keeps the next one out."""

SEARCH_ROWS: Final = 64
"""Rows that Vast gives at most, as last seen; a shorter page is the last one."""
SEARCH_ROWS_WANTED: Final = 1000
SEARCH_PAGES_MAX: Final = 3
LIST_ROWS: Final = 25
LIST_PAGES_MAX: Final = 40
LIST_TRIES: Final = 2
"""A page that shifts while instances come and go makes the count wrong: once more, then no listing at all."""

SCRIPT_BYTES_MAX: Final = 4000
LABEL_CHARS_MAX: Final = 256
VISIBLE_AFTER_S: Final = 15.0
"""Assumed: accepted creates were seen in listings within 10 s (providers.md 7.3)."""

_NO_CREDIT: Final = frozenset({"insufficient_credit", "missing_billing", "spend_rate_limit"})
_MISSING: Final = frozenset({"not_found", "no_such_instance"})
_REFUSED: Final = {"no_such_ask": RefusedWhy.NO_CAPACITY, "bid_too_low": RefusedWhy.BID_TOO_LOW}
_BAD: Final = frozenset({"invalid_args", "invalid_price", "invalid_request", "no_ssh_key_for_vm", "label_too_long"})
_NOT_OURS: Final = "not your own"
_QUEUED: Final = "state change queued"


class Vast:
    """One Vast account. Also `ports.Rebids` and `ports.StopsAndStarts`."""

    def __init__(
        self,
        key: str,
        *,
        name: str = "vast",
        base_url: str = BASE_URL,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        gates = {endpoint: Gate(1, interval_s + _SLACK_S) for endpoint, interval_s in _INTERVALS_S.items()}
        gates["search"] = Gate(_SEARCHES, _SEARCH_WINDOW_S + _SLACK_S)
        gates["create"] = Gate(1, _INTERVALS_S["create"] + _SLACK_S, penalty_s=CREATE_PENALTY_S)
        self._name = name
        self._create_gap_s = gates["create"].seconds
        self._http = Http(name, base_url, key, gates, transport=transport)

    @property
    def name(self) -> str:
        """As in `--providers`."""
        return self._name

    async def capabilities(self) -> Capabilities:
        """Say what Vast can do; nothing of it changes from day to day."""
        return Capabilities(
            spot=True,
            rebid=True,
            stop_start=True,
            dead_man=DeadMan.IN_BOX,
            fuse=Fuse.NO,
            label_chars_max=LABEL_CHARS_MAX,
            script_bytes_max=SCRIPT_BYTES_MAX,
            visible_after_s=VISIBLE_AFTER_S,
            create_gap_s=self._create_gap_s,
            list_gap_s=_INTERVALS_S["list"] + _SLACK_S,
            boot=BOOT_VAST,
        )

    async def search(self, wish: Wish) -> Sequence[Offer]:
        """Return offers in every market of *wish*, cheapest first.

        What fits is asked for first, since an answer's rows are few; when nothing does, everything of that GPU, and
        then everything, so that the caller can say which option excludes it or which names there are.
        """
        markets = [Market.SPOT] if wish.spot else []
        markets += [] if wish.on_demand_max_usd_gpu_h is None else [Market.ON_DEMAND]
        for filters in (_fitting(wish), _named(wish), {}):
            found = [offer for market in markets for offer in await self._search(wish, market, filters)]
            if found:
                return found
        return []

    async def _search(self, wish: Wish, market: Market, filters: Mapping[str, Any]) -> list[Offer]:
        found: dict[str, Offer] = {}
        least_usd_h: float | None = None
        for _ in range(SEARCH_PAGES_MAX if filters else 1):
            body: dict[str, Any] = {
                **filters,
                "verified": {"eq": True},
                "rentable": {"eq": True},
                "type": "bid" if market is Market.SPOT else "on-demand",
                "order": [["dph_total", "asc"]],
                "limit": SEARCH_ROWS_WANTED,
                "allocated_storage": wish.disk_gb,
            }
            if least_usd_h is not None:
                body["dph_total"] = {"gte": least_usd_h}
            answer = self._fine(await self._http.ask("search", "POST", "/api/v0/bundles/", body=body), "search")
            page = rows(answer.document, "offers", f"{self._name}: search")
            offers = [offer for row in page if (offer := offer_of(row, market, self._name)) is not None]
            new = [offer for offer in offers if offer.offer_id not in found]
            found.update({offer.offer_id: offer for offer in new})
            # Pages go by price: there is no other way past the rows that Vast gives at most.
            least_usd_h = max((number(row.get("dph_total")) or 0.0 for row in page), default=0.0)
            if len(page) < SEARCH_ROWS or not new:
                break
        return list(found.values())

    async def create(self, launch: Launch) -> CreateOutcome:
        """Rent, once."""
        assert (launch.offer.market is Market.SPOT) == (launch.bid_usd_h is not None), "a bid is for spot, and only"
        if len(launch.script.encode()) > SCRIPT_BYTES_MAX or len(launch.label) > LABEL_CHARS_MAX:
            return CreateRefused(RefusedWhy.BAD_REQUEST, f"{self._name}: create: script or label too long, not sent")
        secrets = [*launch.environment.values(), *(launch.image_login or "").split()]
        path = f"/api/v0/asks/{launch.offer.offer_id}/"
        answer = await self._http.create(
            path, _order(launch), method="PUT", secrets=secrets, wait_s_max=self._create_gap_s
        )
        return self._outcome(answer) if isinstance(answer, Answer) else answer

    def _outcome(self, answer: Answer) -> CreateOutcome:
        made = text(mapping(answer.document).get("new_contract"))
        said = f"{self._name}: create: status {answer.status} ({answer.words})"
        if answer.status < 300 and mapping(answer.document).get("success") is True:
            return Created(made) if made else CreateUnknown(f"{said}: success without a contract")
        why = _why(answer)
        if made:
            # A refusal with a contract in it: a stopped instance is there, and its disk is billed (gh:dstack#4036).
            return CreateRefused(why or RefusedWhy.BID_TOO_LOW, said, left_behind=(made,))
        return CreateUnknown(said) if why is None else CreateRefused(why, said)

    async def list_instances(self) -> Sequence[Instance]:
        """Return every instance, or raise when the pages do not add up."""
        for _ in range(LIST_TRIES):
            instances, total = await self._listing()
            if len(instances) == total:
                return list(instances.values())
        raise ProviderUnavailable(f"{self._name}: list: {len(instances)} rows of {total}; try again later")

    async def _listing(self) -> tuple[dict[str, Instance], int]:
        """Return the rows of all pages by id, and how many the last page said there are."""
        found: dict[str, Instance] = {}
        query = {"limit": str(LIST_ROWS), "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        for _ in range(LIST_PAGES_MAX):
            answer = self._fine(await self._http.ask("list", "GET", "/api/v1/instances/", query=query), "list")
            for row in rows(answer.document, "instances", f"{self._name}: list"):
                instance = self._instance(row)
                found[instance.instance_id] = instance
            total, token = number(mapping(answer.document).get("total_instances")), answer.field("next_token")
            if not token:
                return found, len(found) if total is None else int(total)
            query["after_token"] = token
        raise ProviderUnavailable(f"{self._name}: list: more than {LIST_PAGES_MAX} pages; end some instances")

    async def show(self, instance_id: str) -> Instance | None:
        """Return one instance; Vast answers null, or 404, for one that is gone."""
        if not instance_id.isdigit():
            return None
        answer = await self._http.ask("show", "GET", f"/api/v0/instances/{instance_id}/", query={"owner": "me"})
        if answer.status == 404 and answer.field("error") in _MISSING:
            return None
        document = mapping(self._fine(answer, "show").document)
        if "instances" not in document:
            raise ProviderUnavailable(f"{self._name}: show: the answer has no 'instances'; try again later")
        row = document["instances"]
        return None if row is None else self._instance(mapping(row))

    async def destroy(self, instance_id: str) -> None:
        """End an instance and its disk. What is no number is no instance of Vast's."""
        if not instance_id.isdigit():
            return
        answer = await self._http.ask("destroy", "DELETE", f"/api/v0/instances/{instance_id}/", body={})
        if answer.status != 404 or answer.field("error") not in _MISSING:
            self._fine(answer, "destroy")

    async def rebid(self, instance_id: str, bid_usd_h: float) -> None:
        """Raise a machine's bid; dollars per hour for all its GPUs, like `price` of a create."""
        body = {"client_id": "me", "price": bid_usd_h}
        self._fine(await self._http.ask("bid", "PUT", f"/api/v0/instances/bid_price/{instance_id}/", body=body), "bid")

    async def stop(self, instance_id: str) -> None:
        """Stop an instance."""
        await self._state(instance_id, "stopped")

    async def start(self, instance_id: str) -> None:
        """Start an instance, or raise ProviderRefused with nothing queued."""
        answer = await self._state(instance_id, "running")
        if _QUEUED in answer.words:
            # Left alone it would start, and bill, whenever the GPU is free again.
            await self._state(instance_id, "stopped")
            raise ProviderRefused(f"{self._name}: start: the GPUs of {instance_id} are taken")

    async def _state(self, instance_id: str, state: str) -> Answer:
        path = f"/api/v0/instances/{instance_id}/"
        return self._fine(await self._http.ask("state", "PUT", path, body={"state": state}), state)

    async def balance_usd(self) -> float | None:
        """Return the account's credit."""
        answer = self._fine(await self._http.ask("user", "GET", "/api/v0/users/current/"), "user")
        return number(mapping(answer.document).get("credit"))

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._http.aclose()

    def _instance(self, row: Mapping[str, Any]) -> Instance:
        instance = instance_of(row, self._name)
        if instance is None:
            raise ProviderUnavailable(f"{self._name}: a listed instance has no id; try again later")
        return instance

    def _fine(self, answer: Answer, what: str) -> Answer:
        """Return the answer of a call that succeeded, or raise; a search answers a wrong key with 404."""
        said = f"{self._name}: {what}: status {answer.status} ({answer.words})"
        why = _why(answer)
        if why is RefusedWhy.DENIED:
            raise ProviderDenied(f"{said}: set a valid key")
        if why is RefusedWhy.NO_CREDIT:
            raise NoCredit(f"{said}: add credit")
        if answer.status >= 400:
            raise ProviderRefused(said)
        if mapping(answer.document).get("success") is False:
            # Status 200 and no success names no reason that would last.
            raise ProviderUnavailable(f"{said}: try again later")
        return answer


def _why(answer: Answer) -> RefusedWhy | None:
    """Return why a call was refused, or None where the answer proves nothing."""
    error = answer.field("error")
    if error == "auth_error" or answer.status == 401:
        return RefusedWhy.DENIED
    if error in _NO_CREDIT or answer.status == 402:
        return RefusedWhy.NO_CREDIT
    for word, why in _REFUSED.items():
        if error == word or word in answer.words:
            return why
    if _NOT_OURS in answer.words or answer.status in (404, 410):
        return RefusedWhy.NO_CAPACITY
    return RefusedWhy.BAD_REQUEST if answer.status >= 400 or error in _BAD else None


def _order(launch: Launch) -> dict[str, Any]:
    """Return the body of a create (providers.md 1.3); ports are keys of the environment."""
    body: dict[str, Any] = {
        "client_id": "me",
        "image": launch.image,
        "label": launch.label,
        "disk": launch.disk_gb,
        "env": {**launch.environment, "-p 22:22": "1"},
        "runtype": "args",
        "onstart": "/bin/sh",
        "args": ["-c", launch.script],
        "user": "root",
        "cancel_unavail": True,
    }
    if launch.bid_usd_h is not None:
        body["price"] = launch.bid_usd_h
    if launch.image_login is not None:
        body["image_login"] = launch.image_login
    return body


def _named(wish: Wish) -> dict[str, Any]:
    names = sorted({model.vast for model in models_of(wish.gpu)}) or [" ".join(wish.gpu.words)]
    return {"gpu_name": {"in": names}}


def _fitting(wish: Wish) -> dict[str, Any]:
    """Return the filters of *wish* in Vast's units; the caller checks them all again."""
    least = {
        "disk_space": wish.disk_gb,
        "duration": wish.lasts_s_min,
        "inet_up": wish.up_mbps_min,
        "inet_down": wish.down_mbps_min,
        "reliability2": wish.reliability_min,
        "cuda_max_good": 0.0 if wish.cuda_min is None else float(f"{wish.cuda_min[0]}.{wish.cuda_min[1]}"),
    }
    filters: dict[str, Any] = {**_named(wish), "num_gpus": {"eq": wish.gpu_count}}
    return filters | {name: {"gte": value} for name, value in least.items() if value > 0}
