"""An instance as a row of Vast's list (providers.md 1.4), with the traps that clients have fallen into.

`start_date` is a number and `extra_env` a list of pairs, or the official SDK crashes; `ports` is there only while it
runs; `public_ipaddr` ends in a newline; a preemption shows late, and in two forms.
"""

from __future__ import annotations

from typing import Any

from provisioner.simulator.market.instances import Instance, Phase, Why
from provisioner.simulator.vast.offers import MB_PER_GB, hardware, prices, public_ip

STATUS = {
    Phase.PROVISIONING: None,
    Phase.CREATED: "created",
    Phase.LOADING: "loading",
    Phase.RUNNING: "running",
    Phase.STOPPED: "stopped",
    Phase.EXITED: "exited",
    Phase.BROKEN: "created",
    Phase.OFFLINE: "offline",
    Phase.UNKNOWN: "unknown",
}
SSH_PORT = "22/tcp"

EMPTY = {
    "cpu_util": 0.0, "mem_limit": 64.0, "mem_usage": 0.1, "vmem_usage": 0.0, "disk_usage": -1, "disk_util": -1,
    "rentable": False, "template_id": None, "template_name": None, "credit_balance": None, "credit_discount": None,
    "credit_discount_max": 0.0, "volume_info": None,
}  # fmt: skip
"""What this market has nothing to say about."""


def actual_status(instance: Instance) -> str | None:
    """Return the status that clients poll."""
    if instance.shown is Phase.STOPPED:
        if instance.why is Why.QUEUED:
            return "scheduling"
        if instance.why is Why.OUTBID and instance.outbid_shows_exited:
            return "exited"
    return STATUS[instance.shown]


def intended(instance: Instance) -> tuple[str, str, str]:
    """Return intended_status, cur_state and next_state; three times `stopped` is dstack's sign of a preemption."""
    if instance.shown is not Phase.STOPPED or (instance.why is Why.OUTBID and instance.outbid_shows_exited):
        return "running", "running", "running"
    if instance.why is Why.QUEUED:
        return "running", "stopped", "running"
    return "stopped", "stopped", "stopped"


def instance_row(instance: Instance, now: float) -> dict[str, Any]:
    """Return the whole row."""
    order, machine = instance.order, instance.machine
    intended_status, cur_state, next_state = intended(instance)
    running = instance.shown is Phase.RUNNING
    row = {
        **hardware(machine, order.gpus),
        **prices(machine, round(instance.gpu_rate(), 6), order.disk_gb),
        "id": int(instance.ident),
        "bundle_id": machine.machine_id * 10,
        "actual_status": actual_status(instance),
        "intended_status": intended_status,
        "cur_state": cur_state,
        "next_state": next_state,
        "status_msg": instance.message or None,
        "label": instance.label or None,
        "is_bid": instance.is_spot,
        "min_bid": round((machine.min_bid(order.gpus) or machine.floor) * order.gpus, 6),
        "start_date": instance.created_at,
        "end_date": machine.contract_end,
        "duration": now - instance.created_at,
        "uptime_mins": None if instance.started_at is None else (now - instance.started_at) / 60,
        "num_gpus": order.gpus,
        "gpu_frac": order.gpus / machine.gpus,
        "gpu_totalram": machine.gpu.memory_gb * MB_PER_GB * order.gpus,
        "gpu_util": 0.0 if running else None,
        "gpu_temp": 41.0 if running else None,
        "disk_space": order.disk_gb,
        **_as_ordered(instance),
        **_addresses(instance),
    }
    if running and "no_ports" not in instance.fate:
        row["ports"] = published_ports(instance)
    return row


def _as_ordered(instance: Instance) -> dict[str, Any]:
    """Return what the create call asked for, and what is always empty here."""
    order = instance.order
    env = order.asked.get("env") or {}
    return {
        "onstart": order.command or None,
        "image_uuid": order.image,
        "image_args": order.asked.get("args") or [],
        "image_runtype": order.asked.get("runtype") or "ssh",
        "extra_env": [[name, value] for name, value in env.items()],
        "template_hash_id": order.asked.get("template_hash_id"),
        "jupyter_token": instance.instance_key[-16:],
        **EMPTY,
    }


def published_ports(instance: Instance) -> dict[str, list[dict[str, str]]]:
    """Return the mapping of container ports to the host's, in docker's form."""
    first = instance.port_base + (instance.boots if "moving_ports" in instance.fate else 0)
    names = [SSH_PORT, *(port for port in instance.order.ports if port != SSH_PORT)]
    return {name: [{"HostIp": "0.0.0.0", "HostPort": str(first + offset)}] for offset, name in enumerate(names)}


def _addresses(instance: Instance) -> dict[str, Any]:
    address = "10.0.17.4" if "private_ip" in instance.fate else public_ip(instance.machine)
    return {
        "public_ipaddr": f"{address}\n",
        "local_ipaddrs": "10.0.17.4 172.17.0.1 \n",
        "ssh_host": f"ssh{instance.number % 9 + 1}.vast.ai",
        "ssh_port": instance.port_base + 1000,
        "ssh_idx": str(instance.number % 9 + 1),
        "machine_dir_ssh_port": instance.port_base + 2000,
        "direct_port_count": 64,
        "direct_port_start": -1,
        "direct_port_end": -1,
    }
