"""Vast's create call, `PUT /api/v0/asks/{id}/` and its bulk form, with the many ways in which it ends.

providers.md 1.3: no price means on-demand, silently; a bid that is too low leaves a stopped instance behind an error;
without `cancel_unavail` a taken offer gives a contract that waits, and bills, until the GPUs are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.market.instances import Instance, Order, Reason, Refused, Why
from provisioner.simulator.market.machines import Offer
from provisioner.simulator.vast.replies import failure, invalid_args, no_such_ask
from provisioner.simulator.wire import Reply, json_reply

# Limits of create_instance.yaml, x-input-validation.
IMAGE_CHARS_MAX = 1024
LABEL_CHARS_MAX = 256
SCRIPT_CHARS_MAX = 4096
ENV_NAME_CHARS_MAX, ENV_CHARS_MAX = 256, 32_768
PRICE_MIN, PRICE_MAX = 0.001, 128.0
DISK_GB_MIN, DISK_GB_DEFAULT = 8.0, 8.0
BULK_MAX = 64

RUNTYPES = frozenset({
    "ssh", "jupyter", "args", "ssh_proxy", "ssh_direct", "ssh_direc", "jupyter_proxy", "jupyter_direct",
    "jupyter_direc",
})  # fmt: skip
"""The documented words and the ones that the SDK really sends; `jupyter_ssl` is none of them (providers.md 1.9)."""

DOCKER_FLAGS = ("-p ", "-h ", "-v ", "-n ")


def create(call: Call) -> Reply:
    """`PUT /api/v0/asks/{id}/`."""
    return _create(call, call.params["id"], call.request.json())


def create_bulk(call: Call) -> Reply:
    """`POST /api/v0/asks/bulk/`: one body for several offers. What a partial failure looks like is undocumented."""
    body = call.request.json()
    asks = body.get("ids")
    if not isinstance(asks, list) or not 0 < len(asks) <= BULK_MAX:
        return invalid_args(f"'ids' must be a list of 1 to {BULK_MAX} offer IDs")
    results = [{"ask_id": ask, **_create(call, str(ask), body).document()} for ask in asks]
    made = [result["new_contract"] for result in results if result["success"]]
    return json_reply(200, {"success": bool(made), "new_contracts": made, "results": results})


def _create(call: Call, ask: str, body: Mapping[str, Any]) -> Reply:
    if not ask.isdigit():
        return invalid_args("'id' is required and must be a valid offer ID")
    if (refusal := _refusal(body)) is not None:
        return refusal
    offer = call.world.offer(int(ask))
    if offer is None:
        return no_such_ask(int(ask))
    order = _order(call, offer, body)
    _others_come_first(call, order)
    try:
        instance = call.world.rent(order, call.fate)
    except Refused as error:
        return _no(error, int(ask), cancel_unavail=bool(body.get("cancel_unavail")))
    call.entry.instance = instance.key
    return _made(instance, int(ask))


def _made(instance: Instance, ask_id: int) -> Reply:
    contract = int(instance.ident)
    if instance.why is Why.LOW_BID:
        # The trap of gh:dstack#4036: an error, and yet a contract whose disk costs money.
        msg = f"error 400/3740: bid_too_low Bid is below the current minimum for instance type {ask_id}."
        return failure(400, "bid_too_low", msg, ask_id=ask_id, new_contract=contract)
    return json_reply(200, {"success": True, "new_contract": contract, "instance_api_key": instance.instance_key})


def _no(error: Refused, ask_id: int, *, cancel_unavail: bool) -> Reply:
    match error.reason:
        case Reason.NO_CREDIT:
            return failure(
                400, "insufficient_credit", "Your account lacks credit; see the billing page.", ask_id=ask_id
            )
        case Reason.NO_DISK:
            return invalid_args(f"disk: {error}")
        case _:
            return no_such_ask(ask_id, "410" if cancel_unavail else "404")


def _others_come_first(call: Call, order: Order) -> None:
    """Let the faults strike that put another customer before this one (providers.md 7.3, 2 and 3)."""
    machine = order.machine
    if fault := call.struck_by("taken"):
        call.world.rivals.take(machine, machine.gpus, float(fault.params.get("for_s", 3600.0)))
    if (fault := call.struck_by("outbid_first")) and order.bid is not None:
        above = round(order.bid * float(fault.params.get("factor", 1.2)), 6)
        call.world.rivals.take(machine, machine.gpus, float(fault.params.get("for_s", 3600.0)), bid=above)


def _refusal(body: Mapping[str, Any]) -> Reply | None:
    """Check the limits of create_instance.yaml; return the refusal, or None."""
    price, disk = body.get("price"), body.get("disk")
    runtype = str(body.get("runtype") or "ssh")
    script = len(str(body.get("onstart") or "")) + len(str(body.get("args_str") or ""))
    script += sum(len(str(part)) for part in body.get("args") or [])
    if price is not None and not (isinstance(price, int | float) and PRICE_MIN <= price <= PRICE_MAX):
        return failure(400, "invalid_price", f"error 400/3470: price {price!r} must be from {PRICE_MIN} to {PRICE_MAX}")
    checks = (
        (not body.get("image") and not body.get("template_hash_id"), "'image' is required"),
        (len(str(body.get("image") or "")) > IMAGE_CHARS_MAX, f"'image' is longer than {IMAGE_CHARS_MAX}"),
        (len(str(body.get("label") or "")) > LABEL_CHARS_MAX, f"'label' is longer than {LABEL_CHARS_MAX}"),
        (script > SCRIPT_CHARS_MAX, f"'args', 'args_str' and 'onstart' are longer than {SCRIPT_CHARS_MAX}"),
        (disk is not None and float(disk) < DISK_GB_MIN, f"'disk' must be at least {DISK_GB_MIN}"),
        (not set(runtype.split()) <= RUNTYPES, f"'runtype' {runtype!r} is unknown"),
        (
            not _env_fits(body.get("env")),
            f"'env' has a name over {ENV_NAME_CHARS_MAX} or is over {ENV_CHARS_MAX} in all",
        ),
    )
    return next((invalid_args(detail) for broken, detail in checks if broken), None)


def _env_fits(env: object) -> bool:
    if not isinstance(env, dict):
        return True
    total = sum(len(str(name)) + len(str(value)) for name, value in env.items())
    return total <= ENV_CHARS_MAX and all(len(str(name)) <= ENV_NAME_CHARS_MAX for name in env)


def _order(call: Call, offer: Offer, body: Mapping[str, Any]) -> Order:
    given = body.get("env")
    # A string of docker flags is accepted and has no effect (creating-instances-with-api.mdx, Common Pitfalls).
    env = {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    price, args = body.get("price"), body.get("args")
    return Order(
        provider="vast",
        account=call.account,
        machine=offer.machine,
        gpus=offer.gpus,
        bid=None if price is None else float(price) / offer.gpus,
        label=str(body.get("label") or ""),
        image=str(body.get("image") or "template"),
        disk_gb=float(body.get("disk") or DISK_GB_DEFAULT),
        env={name: value for name, value in env.items() if not name.startswith(DOCKER_FLAGS)},
        command=str(body.get("onstart") or ""),
        ports=tuple(port for name in env if name.startswith("-p ") for port in [_port(name)]),
        asked={**body, "env": env, "args": args, "ask_id": offer.ask_id},
        queue=not body.get("cancel_unavail"),
    )


def _port(flag: str) -> str:
    """Return what `-p 8080:8081/udp` publishes, as docker names it.

    >>> _port("-p 8080:8081/udp"), _port("-p 22:22")
    ('8081/udp', '22/tcp')
    """
    port, _, protocol = flag.removeprefix("-p ").strip().rpartition(":")[2].partition("/")
    return f"{port}/{protocol or 'tcp'}"
