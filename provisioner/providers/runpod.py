"""RunPod over REST v2 (providers.md 2.3); over GraphQL only what v2 lacks and a probe has seen (`runpod_graph`).

v2 rents on demand, by kind of GPU, cloud and data centre, and hides the machine. A launch that names its own end goes
over GraphQL where `terminateAfter` exists: RunPod then destroys the pod even if nobody else does. Pods are listed
over v2 however they were made, so `Instance.market` stays unknown here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import httpx

from provisioner.core.errors import NoCredit, ProviderDenied, ProviderRefused, ProviderUnavailable
from provisioner.core.gpus import MODELS, Gpu, gpu_of
from provisioner.core.offers import Fuse, Market, Offer, Price
from provisioner.core.ports import (
    Capabilities,
    Created,
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    DeadMan,
    Instance,
    InstanceStatus,
    Launch,
    RefusedWhy,
    SshAddress,
)
from provisioner.core.timing import BOOT_RUNPOD
from provisioner.core.wishes import Wish
from provisioner.providers.gates import Gate
from provisioner.providers.http import Answer, Http
from provisioner.providers.reading import mapping, number, rows, text, version
from provisioner.providers.runpod_graph import CAPACITY_WORDS, Graph, Place, place_of

BASE_URL: Final = "https://api.runpod.io"
CALLS_PER_MINUTE: Final = 48
"""Of 60; and of 3,000 an hour, which is the tighter limit for who keeps asking (providers.md 2.3)."""
CREATE_GAP_S: Final = 1.25
LIST_GAP_S: Final = 2.5
SCRIPT_BYTES_MAX: Final = 4000
ENVIRONMENT_MAX: Final = 50
"""Variables per pod (providers.md 2.4)."""
LABEL_CHARS_MAX: Final = 191
VISIBLE_AFTER_S: Final = 15.0
"""Assumed, as for Vast."""
DISK_USD_GB_MONTH: Final = 0.10
"""List price of container disk; the API does not say it."""
DISK_GB_MAX: Final = 2000.0
"""Assumed: the catalogue does not say what a machine has, and a create that asks too much is refused."""
NOTICE_SPOT_S: Final = 5.0

_CLOUDS: Final = ("SECURE", "COMMUNITY")
_STATUS: Final = {
    "PROVISIONING": InstanceStatus.CREATING,
    "STARTING": InstanceStatus.LOADING,
    "RUNNING": InstanceStatus.RUNNING,
    "EXITED": InstanceStatus.STOPPED,
    "ERROR": InstanceStatus.FAILED,
    "TERMINATED": InstanceStatus.GONE,
}
_RULE_WORDS: Final = ("mutually exclusive", "exactly one", "at most", "longer than", "must be", "required", "invalid")
"""In the details of a 400 that is about the request itself."""


class RunPod:
    """One RunPod account. Also `ports.StopsAndStarts`, and `ports.Rebids` while there is spot."""

    def __init__(
        self,
        key: str,
        *,
        name: str = "runpod",
        base_url: str = BASE_URL,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._name = name
        gates = {"create": Gate(1, CREATE_GAP_S), "list": Gate(1, LIST_GAP_S)}
        shared = Gate(CALLS_PER_MINUTE, 60.0, penalty_s=5.0)
        self._http = Http(name, base_url, key, gates, shared=shared, transport=transport)
        self._graph = Graph(name, self._http)
        self._gpus: dict[str, Gpu] = {
            model.runpod: Gpu(model.name, model.memory_gb) for model in MODELS if model.runpod
        }

    @property
    def name(self) -> str:
        """As in `--providers`."""
        return self._name

    async def capabilities(self) -> Capabilities:
        """Say what RunPod can do, after a probe of its older interface."""
        graph = await self._graph.abilities()
        return Capabilities(
            spot=graph.spot,
            rebid=graph.spot,
            stop_start=True,
            dead_man=DeadMan.SERVER if graph.terminate_after else DeadMan.IN_BOX,
            fuse=Fuse.NO,
            label_chars_max=LABEL_CHARS_MAX,
            script_bytes_max=SCRIPT_BYTES_MAX,
            visible_after_s=VISIBLE_AFTER_S,
            create_gap_s=CREATE_GAP_S,
            list_gap_s=LIST_GAP_S,
            notice_s=NOTICE_SPOT_S if graph.spot else 0.0,
            boot=BOOT_RUNPOD,
            names_machines=False,
        )

    async def search(self, wish: Wish) -> Sequence[Offer]:
        """Return an offer per kind of GPU, cloud and data centre with stock; when none fits, all kinds by name."""
        spot = wish.spot and (await self._graph.abilities()).spot
        fitting: list[Offer] = []
        others: list[Offer] = []
        for cloud in _CLOUDS:
            query = {"include": "AVAILABILITY", "product": "POD", "count": str(wish.gpu_count), "cloud": cloud}
            answer = self._fine(await self._http.ask("search", "GET", "/v2/catalog/gpus", query=query), "search")
            for row in rows(answer.document, "gpus", f"{self._name}: search"):
                offers = self._on_demand(row, cloud, wish)
                matching = [offer for offer in offers if wish.gpu.means(offer.gpu)]
                others += offers[:1]
                fitting += matching if wish.on_demand_max_usd_gpu_h is not None else []
                if spot and matching:
                    fitting += await self._spot(matching[0], cloud, wish.gpu_count)
        return fitting or others

    def _on_demand(self, row: Mapping[str, Any], cloud: str, wish: Wish) -> list[Offer]:
        gpu_id, memory_gb = text(row.get("id")), number(row.get("memory"))
        usd_gpu_h = number(mapping(row.get("price")).get(cloud.lower()))
        if not gpu_id or not memory_gb or not usd_gpu_h or text(row.get("availability")) in ("", "NONE"):
            return []
        gpu = self._gpus[gpu_id] = gpu_of(gpu_id, memory_gb)
        stocked = [one for one in _list(row.get("dataCenters")) if text(one.get("availability")) != "NONE"]
        cudas = [version(one.get("version")) for one in _list(row.get("cudaVersions")) if one.get("available")]
        return [
            Offer(
                provider=self._name,
                offer_id=str(Place(cloud, center, gpu_id)),
                gpu=gpu,
                gpu_count=wish.gpu_count,
                market=Market.ON_DEMAND,
                price=Price(usd_gpu_h * wish.gpu_count, DISK_USD_GB_MONTH),
                location=center,
                disk_gb_max=DISK_GB_MAX,
                fuse=Fuse.NO,
                cuda_max=max((cuda for cuda in cudas if cuda is not None), default=None),
            )
            for center in ([text(one.get("id")) for one in stocked] or [""])
        ]

    async def _spot(self, like: Offer, cloud: str, count: int) -> list[Offer]:
        """Return the kind of *like* as spot, anywhere in its cloud: minimum bids are not told by data centre."""
        gpu_id = place_of(like.offer_id).gpu_id
        bid_usd_gpu_h = (await self._graph.min_bids(gpu_id, count)).get(cloud)
        if bid_usd_gpu_h is None:
            return []
        bid_usd_h = bid_usd_gpu_h * count
        return [
            Offer(
                provider=self._name,
                offer_id=str(Place(cloud, "", gpu_id)),
                gpu=like.gpu,
                gpu_count=count,
                market=Market.SPOT,
                price=Price(bid_usd_h, DISK_USD_GB_MONTH),
                location="",
                disk_gb_max=DISK_GB_MAX,
                fuse=Fuse.NO,
                min_bid_usd_h=bid_usd_h,
                cuda_max=like.cuda_max,
            )
        ]

    async def create(self, launch: Launch) -> CreateOutcome:
        """Rent, once, over one of the two protocols: which one is decided before, and never both."""
        assert (launch.offer.market is Market.SPOT) == (launch.bid_usd_h is not None), "a bid is for spot, and only"
        args = shlex.join(["/bin/sh", "-c", launch.script])
        if len(launch.environment) > ENVIRONMENT_MAX or len(launch.label) > LABEL_CHARS_MAX:
            return CreateRefused(RefusedWhy.BAD_REQUEST, f"{self._name}: create: too many variables, or a long label")
        secrets = [*launch.environment.values(), launch.image_login or ""]
        if launch.bid_usd_h is not None or (
            launch.ends_at_s is not None and (await self._graph.abilities()).terminate_after
        ):
            return await self._graph.create(launch, args, secrets=secrets, wait_s_max=CREATE_GAP_S)
        answer = await self._http.create(
            "/v2/pods", _order(launch, args), method="POST", secrets=secrets, wait_s_max=CREATE_GAP_S
        )
        return self._outcome(answer) if isinstance(answer, Answer) else answer

    def _outcome(self, answer: Answer) -> CreateOutcome:
        said = f"{self._name}: create: status {answer.status} ({answer.words})"
        if answer.status < 300:
            made = answer.field("id")
            return Created(made) if made else CreateUnknown(f"{said}: no id of a pod")
        words = answer.words.lower()
        match answer.status:
            case 401:
                why = RefusedWhy.DENIED
            case 402:
                why = RefusedWhy.NO_CREDIT
            case 400 if any(word in words for word in _RULE_WORDS) and not any(
                word in words for word in CAPACITY_WORDS
            ):
                why = RefusedWhy.BAD_REQUEST
            case 400 | 403 | 409:
                # 400 is also no capacity, with nothing but its text to tell; the vendor says to try the next.
                why = RefusedWhy.NO_CAPACITY
            case _:
                why = RefusedWhy.BAD_REQUEST
        return CreateRefused(why, said)

    async def list_instances(self) -> Sequence[Instance]:
        """Return every pod; v2 has no pages."""
        answer = self._fine(await self._http.ask("list", "GET", "/v2/pods"), "list")
        pods = rows(answer.document, "pods", f"{self._name}: list")
        return list({pod.instance_id: pod for pod in map(self._pod, pods)}.values())

    async def show(self, instance_id: str) -> Instance | None:
        """Return one pod."""
        answer = await self._http.ask("show", "GET", _path(instance_id))
        return None if answer.status == 404 else self._pod(mapping(self._fine(answer, "show").document))

    async def destroy(self, instance_id: str) -> None:
        """Terminate a pod and its disk."""
        answer = await self._http.ask("destroy", "DELETE", _path(instance_id))
        if answer.status == 409:
            # A conflict with what the pod is doing passes.
            raise ProviderUnavailable(f"{self._name}: destroy: status 409 ({answer.words}); try again later")
        if answer.status != 404:
            self._fine(answer, "destroy")

    async def rebid(self, instance_id: str, bid_usd_h: float) -> None:
        """Raise a machine's bid, which RunPod counts per GPU; the pod starts when it suffices."""
        pod = await self.show(instance_id)
        if pod is None or not pod.gpu_count:
            raise ProviderRefused(f"{self._name}: bid: there is no pod {instance_id}")
        await self._graph.bid_resume(instance_id, bid_usd_h / pod.gpu_count, pod.gpu_count)

    async def stop(self, instance_id: str) -> None:
        """Stop a pod; its container disk is wiped."""
        await self._act(instance_id, "stop")

    async def start(self, instance_id: str) -> None:
        """Start a pod; RunPod queues nothing."""
        await self._act(instance_id, "start")

    async def _act(self, instance_id: str, action: str) -> None:
        path = f"{_path(instance_id)}/action"
        self._fine(await self._http.ask(action, "POST", path, body={"action": action}), action)

    async def balance_usd(self) -> float | None:
        """Return the balance, which only GraphQL says."""
        return await self._graph.balance_usd() if (await self._graph.abilities()).answers else None

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._http.aclose()

    def _fine(self, answer: Answer, what: str) -> Answer:
        said = f"{self._name}: {what}: status {answer.status} ({answer.words})"
        match answer.status:
            case 401:
                raise ProviderDenied(f"{said}: set a valid key")
            case 402:
                raise NoCredit(f"{said}: add credit")
            case status if status >= 400:
                raise ProviderRefused(said)
            case _:
                return answer

    def _pod(self, row: Mapping[str, Any]) -> Instance:
        instance_id, word = text(row.get("id")), text(row.get("status"))
        if not instance_id:
            raise ProviderUnavailable(f"{self._name}: a listed pod has no id; try again later")
        status = _STATUS.get(word, InstanceStatus.UNKNOWN)
        if status is InstanceStatus.RUNNING and row.get("runtime") is None:
            status = InstanceStatus.LOADING
        gpu, created = mapping(row.get("gpu")), text(row.get("createdAt"))
        count = number(gpu.get("count"))
        return Instance(
            provider=self._name,
            instance_id=instance_id,
            label=text(row.get("name")),
            status=status,
            status_text=word,
            usd_h=number(row.get("cost")),
            gpu=self._gpus.get(text(gpu.get("id"))),
            gpu_count=None if count is None else int(count),
            location=text(row.get("dataCenterId")),
            created_at_s=_moment_s(created),
            ssh=_ssh(mapping(row.get("ssh"))),
        )


def _order(launch: Launch, args: str) -> dict[str, Any]:
    """Return CreatePodRequest; a field that it does not know would be refused."""
    place = place_of(launch.offer.offer_id)
    order: dict[str, Any] = {
        "name": launch.label,
        "image": launch.image,
        "gpu": {"id": place.gpu_id, "count": launch.offer.gpu_count},
        "cloud": place.cloud,
        "disk": math.ceil(launch.disk_gb),
        "env": dict(launch.environment),
        "args": args,
        "ports": ["22/tcp"],
        "startSsh": True,
    }
    if place.center:
        order["dataCenterIds"] = [place.center]
    if launch.image_login is not None:
        order["registry"] = launch.image_login
    return order


def _path(instance_id: str) -> str:
    """Return a pod's path; whatever an id holds, it names nothing but a pod."""
    return f"/v2/pods/{quote(instance_id, safe='')}"


def _list(value: object) -> list[Mapping[str, Any]]:
    return [mapping(one) for one in value] if isinstance(value, list) else []


def _moment_s(written: str) -> float | None:
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _ssh(ways: Mapping[str, Any]) -> SshAddress | None:
    for way in (mapping(ways.get("direct")), mapping(ways.get("proxy"))):
        host, port = text(way.get("host")), number(way.get("port"))
        if host and port:
            return SshAddress(host, int(port), text(way.get("username")) or "root")
    return None
