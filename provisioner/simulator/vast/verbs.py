"""What can be done with a Vast instance, and the calls around it (providers.md 1.5)."""

from __future__ import annotations

from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.market.instances import Instance, Phase
from provisioner.simulator.vast.create import LABEL_CHARS_MAX, PRICE_MAX, PRICE_MIN
from provisioner.simulator.vast.replies import failure, found_or_missing, invalid_args, no_such_instance
from provisioner.simulator.wire import Reply, json_reply

LABEL_CHARS_UPDATE_MAX = 4 * LABEL_CHARS_MAX
BID_PER_GPU_MAX = 32.0
COMMAND_CHARS_MAX = 512

QUEUED = "Required resources are currently unavailable, state change queued."


def destroy(call: Call) -> Reply:
    """`DELETE /api/v0/instances/{id}/`."""
    if not call.params["id"].isdigit():
        return invalid_args("'id' must be an instance ID")
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return failure(404, "not_found", "Instance not found")
    call.destroy(instance)
    return json_reply(200, {"success": True, "msg": f"destroying instance {instance.ident}."})


def destroy_bulk(call: Call) -> Reply:
    """`DELETE /api/v0/instances/` with `instance_ids`."""
    wanted = call.request.json().get("instance_ids")
    if not isinstance(wanted, list) or not wanted:
        return invalid_args("'instance_ids' must be a list of instance IDs")
    found = [instance for ident in wanted if (instance := call.own("vast", str(ident)))]
    for instance in found:
        call.destroy(instance)
    missing = [ident for ident in wanted if str(ident) not in {instance.ident for instance in found}]
    return json_reply(200, {"success": not missing, "msg": f"destroying {len(found)} instances", "missing": missing})


def change(call: Call) -> Reply:
    """`PUT /api/v0/instances/{id}/`: `{"state": …}` or `{"label": …}`."""
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return no_such_instance()
    body = call.request.json()
    if "label" in body:
        label = str(body["label"] or "")
        if len(label) > LABEL_CHARS_UPDATE_MAX:
            return failure(400, "label_too_long", f"label is longer than {LABEL_CHARS_UPDATE_MAX}")
        instance.label = label
        return json_reply(200, {"success": True})
    match body.get("state"):
        case "stopped":
            call.world.stop(instance)
            return json_reply(200, {"success": True, "msg": f"stopping instance {instance.ident}."})
        case "running":
            if fault := call.struck_by("taken"):
                machine = instance.machine
                call.world.rivals.take(machine, machine.gpus, float(fault.params.get("for_s", 600.0)))
            if call.world.start(instance, queue=True):
                return json_reply(200, {"success": True, "msg": f"starting instance {instance.ident}."})
            return json_reply(200, {"success": True, "error": "resources_unavailable", "msg": QUEUED})
        case state:
            return invalid_args(f"'state' is {state!r}; it must be 'running' or 'stopped'")


def change_bid(call: Call) -> Reply:
    """`PUT /api/v0/instances/bid_price/{id}/`: dollars per hour for all GPUs of the instance."""
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return no_such_instance()
    price: Any = call.request.json().get("price")
    highest = min(PRICE_MAX, BID_PER_GPU_MAX * instance.order.gpus)
    if not isinstance(price, int | float) or not PRICE_MIN <= price <= highest:
        return failure(400, "invalid_price", f"price {price!r} must be from {PRICE_MIN} to {highest}")
    if not instance.is_spot:
        return invalid_args(f"instance {instance.ident} is not interruptible")
    call.world.change_bid(instance, float(price) / instance.order.gpus)
    return json_reply(200, {"success": True})


def reboot(call: Call) -> Reply:
    """`PUT /api/v0/instances/reboot/{id}/` and `recycle`."""
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return no_such_instance()
    if instance.phase in {Phase.RUNNING, Phase.EXITED}:
        call.world.lives.restart(instance)
    return json_reply(200, {"success": True})


def request_later(call: Call) -> Reply:
    """`PUT …/request_logs/{id}` and `…/command/{id}/`: the result appears at a URL."""
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return no_such_instance()
    if len(str(call.request.json().get("command", ""))) > COMMAND_CHARS_MAX:
        return invalid_args(f"'command' is longer than {COMMAND_CHARS_MAX}")
    host = call.request.headers.get("host", "127.0.0.1")
    url = f"http://{host}/__sim/logs/{instance.key}"
    return json_reply(200, {"success": True, "result_url": url, "writeable_path": "/var/lib/docker/tmp"})


def attach_key(call: Call) -> Reply:
    """`POST /api/v0/instances/{id}/ssh/`."""
    instance: Instance | None = found_or_missing(call)
    if instance is None:
        return no_such_instance()
    return json_reply(200, {"success": True, "msg": "SSH key attached."})


def user(call: Call) -> Reply:
    """`GET /api/v0/users/current/`."""
    left = call.world.credit_left(call.account)
    return json_reply(
        200,
        {
            "id": 4711, "username": "simulated", "email": "simulated@example.com", "balance": 0.0, "credit": left,
            "ssh_key": None, "host_agreement_accepted": False, "billaddress_country": "SE", "paid_expected": 0,
        },
    )  # fmt: skip


def keys(call: Call) -> Reply:
    """`GET /api/v0/ssh/`: an account without keys gets a 404."""
    return failure(404, "not_found", "No SSH keys found for the user.")
