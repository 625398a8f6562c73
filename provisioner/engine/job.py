"""Run one job from here: take control of it, recover what an earlier controller left, and decide until it has ended."""

from __future__ import annotations

from provisioner.core.happenings import JobEnd, Observer
from provisioner.core.jobs import JobSpec
from provisioner.engine.ports import EnginePorts


async def run_job(spec: JobSpec, ports: EnginePorts, observe: Observer) -> JobEnd:
    """Keep *spec*'s command running until it ends, and leave nothing that costs money.

    Raises ControllerAlive when another controller lives (unless `settings.adopt`), Superseded when one with a higher
    number has taken over, StoreUnavailable when the store does not answer at the start, StoreDenied, LedgerCorrupt and
    BadWish. Cancelled, it leaves everything as it is, and the next call goes on from there, on this machine or another.
    """
    raise NotImplementedError
