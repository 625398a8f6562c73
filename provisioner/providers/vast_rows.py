"""Read Vast's rows: an offer of a search, an instance of a list (traps: providers.md 1.2, 1.4, 1.7)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from provisioner.core.gpus import MB_PER_GB, Gpu, gpu_of
from provisioner.core.offers import Fuse, Market, Offer, Price
from provisioner.core.ports import Instance, InstanceStatus, SshAddress
from provisioner.providers.http import cleaned
from provisioner.providers.reading import mapping, number, text, version

_STATUS: Final = {
    "": InstanceStatus.CREATING,
    "created": InstanceStatus.CREATING,
    "loading": InstanceStatus.LOADING,
    "rebooting": InstanceStatus.LOADING,
    "running": InstanceStatus.RUNNING,
    "scheduling": InstanceStatus.STOPPED,
    "stopped": InstanceStatus.STOPPED,
    "frozen": InstanceStatus.STOPPED,
    # Some preemptions change nothing but this word (providers.md 1.7).
    "exited": InstanceStatus.STOPPED,
    "unknown": InstanceStatus.UNKNOWN,
    "offline": InstanceStatus.UNKNOWN,
}
_BROKEN: Final = ("oci runtime create failed", "manifest unknown", "pull access denied", "no such image")
"""In the message of an instance that will never run, whatever its status says (providers.md 1.4)."""
_INSIDE: Final = tuple(
    ipaddress.ip_network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
_SSH_PORT: Final = "22/tcp"


def offer_of(row: Mapping[str, Any], market: Market, provider: str) -> Offer | None:
    """Return the offer, or None for a row without a price or an id."""
    gpu, count = _gpu(row), number(row.get("num_gpus"))
    min_bid_usd_h = number(row.get("min_bid"))
    compute_usd_h = min_bid_usd_h if market is Market.SPOT else number(row.get("dph_base"))
    offer_id = text(row.get("ask_contract_id")) or text(row.get("id"))
    if gpu is None or not count or count < 1 or compute_usd_h is None or not offer_id:
        return None
    return Offer(
        provider=provider,
        offer_id=offer_id,
        gpu=gpu,
        gpu_count=int(count),
        market=market,
        price=Price(
            compute_usd_h,
            number(row.get("storage_cost")) or 0.0,
            number(row.get("inet_up_cost")) or 0.0,
            number(row.get("inet_down_cost")) or 0.0,
        ),
        location=text(row.get("geolocation")),
        disk_gb_max=number(row.get("disk_space")) or 0.0,
        up_mbps=number(row.get("inet_up")),
        down_mbps=number(row.get("inet_down")),
        machine_id=text(row.get("machine_id")) or None,
        reliability=_first(row, "reliability2", "reliability"),
        fuse=Fuse.NO,  # its containers are unprivileged (providers.md 1.8)
        min_bid_usd_h=min_bid_usd_h if market is Market.SPOT else None,
        contract_ends_at_s=number(row.get("end_date")),
        cuda_max=version(row.get("cuda_max_good")),
    )


def instance_of(row: Mapping[str, Any], provider: str) -> Instance | None:
    """Return the instance, or None for a row without an id."""
    instance_id = text(row.get("id"))
    if not instance_id:
        return None
    status, is_bid = status_of(row), row.get("is_bid")
    spot = is_bid is True
    count = number(row.get("num_gpus"))
    queued = text(row.get("intended_status")) == "running" or text(row.get("actual_status")) == "scheduling"
    return Instance(
        provider=provider,
        instance_id=instance_id,
        label=text(row.get("label")),
        status=status,
        status_text=cleaned(": ".join(filter(None, (text(row.get("actual_status")), text(row.get("status_msg"))))), ()),
        market={True: Market.SPOT, False: Market.ON_DEMAND}.get(is_bid) if isinstance(is_bid, bool) else None,
        usd_h=number(row.get("dph_base")),
        gpu=_gpu(row),
        gpu_count=None if count is None else int(count),
        machine_id=text(row.get("machine_id")) or None,
        location=text(row.get("geolocation")),
        created_at_s=number(row.get("start_date")),
        min_bid_usd_h=number(row.get("min_bid")) if spot else None,
        contract_ends_at_s=number(row.get("end_date")),
        # An outbid one comes back with its priority; one that we stopped looks the same, so it counts too.
        starts_by_itself=status is InstanceStatus.STOPPED and (spot or queued),
        ssh=_ssh(row),
    )


def status_of(row: Mapping[str, Any]) -> InstanceStatus:
    """Return the state. All three other fields on `stopped` is a preemption too (dstack's test, providers.md 1.7)."""
    word = text(row.get("actual_status"))
    status = _STATUS.get(word, InstanceStatus.UNKNOWN)
    if {text(row.get(name)) for name in ("intended_status", "cur_state", "next_state")} == {"stopped"}:
        return InstanceStatus.STOPPED
    booting = status in (InstanceStatus.CREATING, InstanceStatus.LOADING)
    if booting and any(sign in text(row.get("status_msg")).lower() for sign in _BROKEN):
        return InstanceStatus.FAILED
    return status


def _gpu(row: Mapping[str, Any]) -> Gpu | None:
    name, memory_mb = text(row.get("gpu_name")), number(row.get("gpu_ram"))
    return gpu_of(name, memory_mb / MB_PER_GB) if name and memory_mb else None


def _first(row: Mapping[str, Any], *names: str) -> float | None:
    return next((found for name in names if (found := number(row.get(name))) is not None), None)


def _ssh(row: Mapping[str, Any]) -> SshAddress | None:
    """Prefer the published port, where the proxy's key exchange fails; a private address needs the proxy (1.9)."""
    bindings = mapping(row.get("ports")).get(_SSH_PORT)
    published = number(mapping(bindings[0]).get("HostPort")) if isinstance(bindings, list) and bindings else None
    host = text(row.get("public_ipaddr"))
    if published is not None and host and not _is_inside(host):
        return SshAddress(host, int(published))
    proxy, port = text(row.get("ssh_host")), number(row.get("ssh_port"))
    return SshAddress(proxy, int(port)) if proxy and port else None


def _is_inside(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address.version == net.version and address in net for net in _INSIDE)
