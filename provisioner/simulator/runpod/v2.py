"""What REST v2 does with pods (providers.md 2.3; RunPod's OpenAPI file, version 2)."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from provisioner.simulator.calls import Call
from provisioner.simulator.clock import rfc3339
from provisioner.simulator.market.instances import Instance, Order, Phase, Reason, Refused
from provisioner.simulator.runpod import checks, placing
from provisioner.simulator.runpod.pods import actions, pod
from provisioner.simulator.runpod.problems import not_found, problem, unprocessable
from provisioner.simulator.wire import Reply, json_reply

ENV_MAX = 50
"""Variables per pod (providers.md 2.4)."""

NAME_CHARS_MAX = 191
SECONDS_PER_HOUR = 3600


def create(call: Call) -> Reply:
    """`POST /v2/pods`: one kind of GPU, no fallback, no idempotency key."""
    try:
        body = checks.CreatePod.model_validate(call.request.json())
    except ValidationError as error:
        return unprocessable(error)
    if (broken := checks.broken_rule(body)) or (broken := _beyond_limits(body)):
        return problem(400, broken)
    assert body.gpu is not None
    disk_gb = float(body.disk + (body.mounts.persistent.size if body.mounts.persistent else 0))
    wish = placing.Wish(
        body.gpu.id, body.gpu.count, body.cloud, disk_gb, body.dataCenterIds,
        body.gpu.allowedCudaVersions, body.gpu.minCudaVersion,
    )  # fmt: skip
    try:
        machine = placing.place(call.world, wish)
        order = Order(
            provider="runpod", account=call.account, machine=machine, gpus=body.gpu.count, bid=None, label=body.name,
            image=body.image or "template", disk_gb=float(body.disk), env=body.env, command=body.args,
            ports=tuple(body.ports),
            asked={"mounts": body.mounts.model_dump(exclude_none=True), "registry": body.registry},
        )  # fmt: skip
        instance = call.world.rent(order, call.fate)
    except Refused as error:
        return _no(error)
    call.entry.instance = instance.key
    return json_reply(201, pod(instance, call.world.now))


def list_pods(call: Call) -> Reply:
    """`GET /v2/pods`: a terminated pod is not in it."""
    found = [one for one in call.world.listed("runpod", call.account) if call.scope in (None, one)]
    return json_reply(200, {"pods": [pod(instance, call.world.now) for instance in found]})


def show(call: Call) -> Reply:
    """`GET /v2/pods/{id}`."""
    instance = _own(call)
    if instance is None or instance.hidden_until > call.world.now:
        return not_found(call.params["id"])
    return json_reply(200, pod(instance, call.world.now))


def update(call: Call) -> Reply:
    """`PATCH /v2/pods/{id}`: its name and its lock; a new container configuration is accepted and not applied."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    try:
        body = checks.UpdatePod.model_validate(call.request.json())
    except ValidationError as error:
        return unprocessable(error)
    if body.name is not None:
        instance.label = body.name
    if body.locked is not None:
        instance.locked = body.locked
    return json_reply(200, pod(instance, call.world.now))


def delete(call: Call) -> Reply:
    """`DELETE /v2/pods/{id}`: 204 without a body."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    call.destroy(instance)
    return Reply(204)


def act(call: Call) -> Reply:
    """`POST /v2/pods/{id}/action`: 409 for what the pod's status does not allow."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    try:
        action = checks.PodActionBody.model_validate(call.request.json()).action
    except ValidationError as error:
        return unprocessable(error)
    if action not in actions(instance):
        return problem(
            409, f"action {action} is not valid for pod {instance.ident}; valid: {', '.join(actions(instance))}"
        )
    if action == "terminate":
        call.destroy(instance)
        return Reply(204)
    try:
        perform(call, instance, action)
    except Refused as error:
        return problem(400, placing.refusal_text(error))
    return json_reply(200, pod(instance, call.world.now))


def perform(call: Call, instance: Instance, action: str) -> None:
    """Start, stop or restart a pod, or raise Refused. A stop wipes the container's disk (providers.md 2.4)."""
    match action:
        case "stop":
            call.world.stop(instance)
            call.world.lives.nodes.wipe(instance)
        case "restart":
            call.world.lives.restart(instance)
        case _:
            if fault := call.struck_by("taken"):
                machine = instance.machine
                call.world.rivals.take(machine, machine.gpus, float(fault.params.get("for_s", 600.0)))
            if instance.phase is Phase.BROKEN:
                call.world.stop(instance)
            call.world.start(instance, queue=False)


def billing(call: Call) -> Reply:
    """`GET /v2/billing/pods`: one record per pod and hour begun (schema ListPodBillingResponse)."""
    world, wanted = call.world, call.request.query.get("podId")
    records: list[dict[str, Any]] = []
    for bill in world.ledger.settled(world.now):
        ident = bill.key.removeprefix("runpod:")
        if bill.provider != "runpod" or bill.owner != call.account or (wanted and ident != wanted):
            continue
        start = bill.opened_at - bill.opened_at % SECONDS_PER_HOUR
        end = world.now - world.now % SECONDS_PER_HOUR + SECONDS_PER_HOUR
        amounts = {"totalAmount": bill.total(), "gpuAmount": bill.gpu, "cpuAmount": 0.0, "diskAmount": bill.storage}
        records.append({"podId": ident, "startTime": rfc3339(start), "endTime": rfc3339(end), **amounts})
    names = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
    starts = [record["startTime"] for record in records]
    query = {"startTime": min(starts, default=rfc3339(world.now)), "endTime": rfc3339(world.now), "bucketSize": "hour"}
    metadata = {
        "query": query | ({"podId": wanted} if wanted else {}),
        "recordCount": len(records),
        "uniquePodCount": len({record["podId"] for record in records}),
        "totals": {name: sum(record[name] for record in records) for name in names},
    }
    return json_reply(200, {"records": records, "metadata": metadata})


def _no(error: Refused) -> Reply:
    return (
        problem(402, "insufficient balance")
        if error.reason is Reason.NO_CREDIT
        else problem(400, placing.refusal_text(error))
    )


def _beyond_limits(body: checks.CreatePod) -> str | None:
    if len(body.env) > ENV_MAX:
        return f"env has {len(body.env)} variables, at most {ENV_MAX} are allowed"
    return f"name is longer than {NAME_CHARS_MAX}" if len(body.name) > NAME_CHARS_MAX else None


def _own(call: Call) -> Instance | None:
    return call.own("runpod", call.params["id"])
