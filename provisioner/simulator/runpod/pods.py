"""A pod as REST v2 shows it (providers.md 2.3; schema Pod of RunPod's OpenAPI file). There is no machineId."""

from __future__ import annotations

from typing import Any

from provisioner.simulator.clock import rfc3339
from provisioner.simulator.market.instances import Instance, Phase

STATUS = {
    Phase.PROVISIONING: "PROVISIONING",
    Phase.CREATED: "PROVISIONING",
    Phase.LOADING: "STARTING",
    Phase.RUNNING: "RUNNING",
    Phase.STOPPED: "EXITED",
    Phase.EXITED: "EXITED",
    Phase.BROKEN: "ERROR",
    Phase.OFFLINE: "ERROR",
    Phase.UNKNOWN: "ERROR",
    Phase.GONE: "TERMINATED",
}
ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "TERMINATED": [],
}
"""What podAction allows in each status."""

PROXY = "ssh.runpod.io"
FREE_OF_CHARGE = frozenset({"EXITED", "TERMINATED"})


def status(instance: Instance) -> str:
    """Return the pod's status."""
    return STATUS[instance.shown]


def actions(instance: Instance) -> list[str]:
    """Return what may be asked of the pod now; a locked one cannot be stopped or restarted."""
    allowed = ACTIONS[status(instance)]
    return [action for action in allowed if action == "terminate" or not instance.locked]


def public_ip(instance: Instance) -> str:
    """Return an address of a range kept for documentation."""
    return f"198.51.100.{instance.machine.machine_id % 250 + 1}"


def runtime_ports(instance: Instance) -> list[dict[str, Any]]:
    """Return the live port mappings; external ports change at each reset (providers.md 2.4)."""
    if "no_ports" in instance.fate:
        return []
    first = instance.port_base + 8 * (instance.boots % 8)
    private = "private_ip" in instance.fate
    found = []
    for offset, spec in enumerate(instance.order.ports):
        port, _, kind = spec.partition("/")
        if kind == "tcp":
            address = "100.65.0.7" if private else public_ip(instance)
            found.append({"private": int(port), "public": first + offset, "type": "tcp", "ip": address})
        else:
            found.append({"private": int(port), "public": None, "type": kind or "http", "ip": None})
    return found


def pod(instance: Instance, now: float) -> dict[str, Any]:
    """Return the whole Pod."""
    order, state = instance.order, status(instance)
    running = state == "RUNNING"
    return {
        "id": instance.ident,
        "name": instance.label,
        "status": state,
        "actions": actions(instance),
        "image": order.image,
        "args": order.command,
        "disk": int(order.disk_gb),
        "mounts": order.asked.get("mounts") or {},
        "ports": list(order.ports),
        "env": dict(order.env),
        "registry": order.asked.get("registry"),
        "gpu": {"id": instance.machine.gpu.runpod_id, "count": order.gpus},
        "cloud": "SECURE" if instance.machine.secure else "COMMUNITY",
        "dataCenterId": instance.machine.place,
        "cudaVersion": instance.machine.cuda,
        "ssh": _ssh(instance, running=running),
        "template": None,
        "cost": 0.0 if state in FREE_OF_CHARGE else round(instance.gpu_rate(), 6),
        "locked": instance.locked,
        "globalNetworking": {"enabled": False},
        "runtime": _runtime(instance, now) if running else None,
        "createdAt": rfc3339(instance.created_at),
        "startedAt": None if instance.started_at is None else rfc3339(instance.started_at),
    }


def _runtime(instance: Instance, now: float) -> dict[str, Any]:
    started = now if instance.started_at is None else instance.started_at
    return {
        "uptime": int(now - started),
        "gpus": [{"util": 0, "memoryUtil": 0} for _ in range(instance.order.gpus)],
        "cpu": {"util": 1},
        "memory": {"util": 2},
        "ports": runtime_ports(instance),
    }


def _ssh(instance: Instance, *, running: bool) -> dict[str, Any]:
    """Return both ways to reach sshd: the proxy, and the published port 22 of a running pod."""
    token = f"{instance.ident}-{instance.instance_key[-8:]}"
    proxy = {"host": PROXY, "port": 22, "username": token, "command": f"ssh {token}@{PROXY}"}
    direct = None
    for port in runtime_ports(instance) if running else []:
        if port["private"] == 22 and port["type"] == "tcp":
            host, number = port["ip"], port["public"]
            direct = {"host": host, "port": number, "username": "root", "command": f"ssh root@{host} -p {number}"}
    return {"proxy": None if status(instance) == "PROVISIONING" else proxy, "direct": direct}
