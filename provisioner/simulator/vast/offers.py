"""An offer as a row of Vast's search (providers.md 1.2; search_offers.yaml), with its units: MB, Mbps, seconds, $/h."""

from __future__ import annotations

from typing import Any

from provisioner.simulator.market.machines import HOURS_PER_MONTH, Machine, Offer

MB_PER_GB = 1024
DRIVER = "570.86.10"
DRIVER_NUMBER = 570_086_010
GB_PER_TB = 1000
CPU_CORES = 128
NULL_CORES_EVERY = 7


def offer_row(offer: Offer, *, now: float, bid: bool, storage_gb: float) -> dict[str, Any]:
    """Return the row of *offer*, priced for a disk of *storage_gb*, as a bid or on-demand."""
    machine = offer.machine
    min_bid = machine.min_bid(offer.gpus)
    shown_bid = round((machine.floor if min_bid is None else min_bid) * offer.gpus, 6)
    base = shown_bid if bid else round(machine.price * offer.gpus, 6)
    rentable = not machine.delisted and (min_bid is not None if bid else machine.rentable(offer.gpus))
    left_s = max(0.0, machine.contract_end - now)
    return {
        "id": offer.ask_id,
        "ask_contract_id": offer.ask_id,
        "bundle_id": machine.machine_id * 10,
        "is_bid": bid,
        "min_bid": shown_bid,
        "rentable": rentable,
        "rented": not rentable,
        "num_gpus": offer.gpus,
        "gpu_frac": offer.gpus / machine.gpus,
        "gpu_ids": list(range(offer.gpus)),
        "gpu_total_ram": machine.gpu.memory_gb * MB_PER_GB * offer.gpus,
        "start_date": now,
        "end_date": machine.contract_end,
        "duration": left_s,
        "time_remaining": "",
        "time_remaining_isbid": "",
        "rn": 1,
        **hardware(machine, offer.gpus),
        **prices(machine, base, storage_gb),
    }


ALIKE = {
    "hostname": None, "gpu_arch": "nvidia", "gpu_mem_bw": 900.0, "gpu_lanes": 16, "driver_version": DRIVER,
    "driver_vers": DRIVER_NUMBER, "cpu_name": "AMD EPYC 7702 64-Core Processor", "cpu_arch": "amd64", "cpu_ghz": 2.0,
    "cpu_ram": 512 * MB_PER_GB, "disk_name": "nvme", "disk_bw": 3000.0, "expected_reliability": None,
    "verification": "verified", "vericode": 1, "is_vm_deverified": False, "direct_port_count": 64, "static_ip": True,
    "external": None, "vms_enabled": False, "resource_type": "gpu", "cluster_id": None, "pci_gen": 4.0, "pcie_bw": 24.0,
    "bw_nvlink": 0.0, "mobo_name": "H12DSG-O-CPU", "has_avx": 1, "os_version": "22.04", "avail_vol_ask_id": None,
    "avail_vol_dph": None, "avail_vol_size": None, "nw_disk_min_bw": None, "nw_disk_max_bw": None,
    "nw_disk_avg_bw": None,
}  # fmt: skip
"""What does not differ between simulated machines."""


def hardware(machine: Machine, gpus: int) -> dict[str, Any]:
    """Return what is in the machine and how it is connected."""
    gpu, share = machine.gpu, gpus / machine.gpus
    return {
        **ALIKE,
        "machine_id": machine.machine_id,
        "host_id": machine.host_id,
        "gpu_name": gpu.vast_name,
        "gpu_ram": gpu.memory_gb * MB_PER_GB,
        "compute_cap": gpu.compute_cap,
        "cuda_max_good": float(machine.cuda),
        # The vendor sends null now and then (providers.md 1.9, 0ceb37c): here some machines always do.
        "cpu_cores": None if machine.machine_id % NULL_CORES_EVERY == 0 else CPU_CORES,
        "cpu_cores_effective": CPU_CORES * share,
        "disk_space": machine.disk_gb,
        "inet_up": machine.up_mbps,
        "inet_down": machine.down_mbps,
        "inet_up_cost": machine.up_cost,
        "inet_down_cost": machine.down_cost,
        "internet_up_cost_per_tb": machine.up_cost * GB_PER_TB,
        "internet_down_cost_per_tb": machine.down_cost * GB_PER_TB,
        "reliability": machine.reliability,
        "reliability2": machine.reliability,
        "reliability_mult": machine.reliability,
        "geolocation": machine.place,
        "geolocode": machine.place.rpartition(",")[2].strip(),
        "public_ipaddr": public_ip(machine),
        "hosting_type": 1 if machine.secure else 0,
    }


def prices(machine: Machine, base: float, storage_gb: float) -> dict[str, Any]:
    """Return what an hour costs: base plus the disk, a month of which is priced (providers.md 1.2)."""
    disk = storage_gb * machine.storage_cost / HOURS_PER_MONTH
    total = base + disk
    speed = machine.gpu.price * 60.0
    parts = {
        "gpuCostPerHour": base, "diskHour": disk, "totalHour": total, "discountTotalHour": 0,
        "discountedTotalPerHour": total,
    }  # fmt: skip
    return {
        "dph_base": base,
        "dph_total": total,
        "dph_total_adj": total,
        "discounted_dph_total": total,
        "storage_cost": machine.storage_cost,
        "storage_total_cost": disk,
        "score": round(machine.reliability * speed / max(total, 0.001), 4),
        "dlperf": speed,
        "dlperf_per_dphtotal": speed / max(total, 0.001),
        "total_flops": speed,
        "flops_per_dphtotal": speed / max(total, 0.001),
        "credit_discount_max": 0.0,
        "discount_rate": 0.0,
        "search": parts,
        "instance": parts,
    }


def public_ip(machine: Machine) -> str:
    """Return an address of the range kept for documentation."""
    return f"203.0.113.{machine.machine_id % 250 + 1}"
