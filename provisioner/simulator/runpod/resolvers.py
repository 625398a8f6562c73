"""What GraphQL's fields do with pods (providers.md 2.1, with the texts of its errors)."""

from __future__ import annotations

from typing import Any

from graphql import GraphQLError

from provisioner.simulator.calls import Call
from provisioner.simulator.clock import from_rfc3339
from provisioner.simulator.market.catalog import GPUS
from provisioner.simulator.market.instances import Instance, Order, Reason, Refused
from provisioner.simulator.runpod import placing, v2
from provisioner.simulator.runpod.graph_views import gpu_view, pod_view

NO_POD_TO_TERMINATE = "pod not found to terminate"
SPOT_IS_NO_ON_DEMAND = "Cannot resume a spot pod as an on demand pod."


class Resolvers:
    """The fields of Query and Mutation for one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._world = call.world

    def root(self) -> dict[str, Any]:
        """Return the resolvers by field; each takes the field's arguments by keyword."""
        return {
            "myself": lambda _info: self._myself(),
            "pod": lambda _info, input=None: self._pod(input),
            "gpuTypes": lambda _info, input=None: self._gpu_types(input or {}),
            "podFindAndDeployOnDemand": lambda _info, input=None: self._deploy(input or {}),
            "podRentInterruptable": lambda _info, input: self._deploy(input, float(input["bidPerGpu"])),
            "podStop": lambda _info, input: self._perform(input, "stop"),
            "podResume": lambda _info, input: self._resume(input),
            "podBidResume": lambda _info, input: self._bid_resume(input),
            "podTerminate": lambda _info, input: self._terminate(input),
        }

    def _myself(self) -> dict[str, Any]:
        listed = self._world.listed("runpod", self._call.account)
        return {
            "id": "user_simulated",
            "email": "simulated@example.com",
            "pubKey": None,
            "clientBalance": self._world.credit_left(self._call.account),
            "pods": [self._view(one) for one in listed if self._call.scope in (None, one)],
            "networkVolumes": [],
        }

    def _pod(self, wish: dict[str, Any] | None) -> dict[str, Any] | None:
        instance = self._call.own("runpod", str((wish or {}).get("podId")))
        hidden = instance is None or instance.hidden_until > self._world.now
        return None if instance is None or hidden else self._view(instance)

    def _gpu_types(self, wish: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = wish.get("ids") or ([wish["id"]] if wish.get("id") else None)
        return [gpu_view(self._world, gpu) for gpu in GPUS if wanted is None or gpu.runpod_id in wanted]

    def _deploy(self, asked: dict[str, Any], bid: float | None = None) -> dict[str, Any]:
        disk_gb = float(asked.get("containerDiskInGb") or 20)
        volume_gb = float(asked.get("volumeInGb") or 0)
        wish = placing.Wish(
            str(asked.get("gpuTypeId")), int(asked.get("gpuCount") or 1), str(asked.get("cloudType") or "ALL"),
            disk_gb + volume_gb, [asked["dataCenterId"]] if asked.get("dataCenterId") else [],
            asked.get("allowedCudaVersions") or [], asked.get("minCudaVersion"), bid,
        )  # fmt: skip
        try:
            order = Order(
                provider="runpod", account=self._call.account, machine=placing.place(self._world, wish),
                gpus=wish.count, bid=bid, label=str(asked.get("name") or ""),
                image=str(asked.get("imageName") or "template"),
                disk_gb=disk_gb + volume_gb, env={one["key"]: one["value"] for one in asked.get("env") or []},
                command=str(asked.get("dockerArgs") or ""),
                ports=tuple(port for port in str(asked.get("ports") or "").split(",") if port),
                asked={**asked}, lifetime_s=self._lifetime(asked.get("terminateAfter")),
            )  # fmt: skip
            instance = self._world.rent(order, self._call.fate)
        except Refused as error:
            raise _refused(error, spot=bid is not None) from error
        self._call.entry.instance = instance.key
        return self._view(instance)

    def _lifetime(self, moment: str | None) -> float | None:
        try:
            return None if moment is None else from_rfc3339(moment) - self._world.now
        except ValueError as error:
            raise GraphQLError(f"terminateAfter {moment!r} is not a time") from error

    def _perform(self, asked: dict[str, Any], action: str) -> dict[str, Any]:
        instance = self._own(asked)
        try:
            v2.perform(self._call, instance, action)
        except Refused as error:
            raise _refused(error) from error
        return self._view(instance)

    def _resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._own(asked).is_spot:
            raise GraphQLError(SPOT_IS_NO_ON_DEMAND, extensions={"code": "RUNPOD"})
        return self._perform(asked, "start")

    def _bid_resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        instance = self._own(asked)
        instance.claim.bid = float(asked["bidPerGpu"])
        return self._perform(asked, "start")

    def _terminate(self, asked: dict[str, Any]) -> None:
        instance = self._call.own("runpod", str(asked.get("podId")))
        if instance is None:
            raise GraphQLError(NO_POD_TO_TERMINATE, extensions={"code": "RUNPOD"})
        self._call.destroy(instance)

    def _own(self, asked: dict[str, Any]) -> Instance:
        instance = self._call.own("runpod", str(asked.get("podId")))
        if instance is None:
            raise GraphQLError("pod not found", extensions={"code": "RUNPOD"})
        return instance

    def _view(self, instance: Instance) -> dict[str, Any]:
        return pod_view(instance, self._world.now)


def _refused(error: Refused, *, spot: bool = False) -> GraphQLError:
    if error.reason is Reason.NO_CREDIT:
        text = "You do not have enough balance to deploy this pod."
    else:
        text = placing.refusal_text(error)
        text = placing.NO_CAPACITY_SPOT if spot and text == placing.NO_CAPACITY else text
    return GraphQLError(text, extensions={"code": "RUNPOD"})
