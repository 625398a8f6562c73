"""Run a job's controller in this process: ports for the engine, the display, and what Ctrl-C may mean.

Invariant: however this process ends, nodes go on or are torn down by an engine that says so; nothing is destroyed
because somebody closed a window.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import trio

from provisioner.cli import jobs_here
from provisioner.cli.asking import opened_store
from provisioner.cli.live import Shown
from provisioner.cli.making_plan import opened
from provisioner.cli.planning import COMEBACKS_H
from provisioner.cli.wishing import Ordered
from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.happenings import JobEnd
from provisioner.core.jobs import JobSpec
from provisioner.core.ports import Provider, Shelf
from provisioner.core.rendezvous import Request, RequestKind, encode, request_key
from provisioner.core.timing import Comeback
from provisioner.engine import EnginePorts, EngineSettings, Me, SharedAccount, SharedListings, run_job
from provisioner.engine.ports import LaunchMaker
from provisioner.ledger.store import LmdbLedger
from provisioner.meeting import StoreShelf, StoreWorkspace
from provisioner.system import SystemClock, SystemEntropy

QUESTION: Final = (
    "\n[l]eave it running in the background, [t]ear everything down, or [c]ontinue watching? "
    "(Ctrl-C again: just leave) "
)


class Left(Enum):
    """How a controller ended before its job did."""

    QUIT = "quit"
    """Nodes go on without a controller, for as long as their dead-man switch lets them."""
    DETACH = "detach"
    """A controller in the background is to go on."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a controller."""

    order: Ordered
    spec: JobSpec
    adopt: bool = False
    again: bool = False
    interactive: bool = False
    """Whether Ctrl-C may ask."""


LaunchMakers = Callable[[Ordered, JobSpec, StoreShelf, Mapping[str, Provider]], Awaitable[LaunchMaker]]


async def control(
    run: Run, providers: Mapping[str, Provider], shown: Shown, launch_makers: LaunchMakers
) -> JobEnd | Left:
    """Keep the job running from here until it ends, or until the user leaves."""
    settings = run.order.loaded.settings
    jobs_here.JobsHere(settings.state_dir).write(run.spec.job, settings.store_url(), run.spec.workspace)
    ledger = LmdbLedger(settings.state_dir / "ledger")
    try:
        async with opened(providers), opened_store(run.order.loaded) as (store, shelf):
            clock, state = SystemClock(), settings.state_dir
            ports = EnginePorts(
                providers={name: SharedAccount(one, state, clock) for name, one in providers.items()},
                shelf=shelf,
                workspace=StoreWorkspace(store, run.spec.workspace),
                ledger=ledger,
                clock=clock,
                entropy=SystemEntropy(),
                launch_maker=await launch_makers(run.order, run.spec, shelf, providers),
                me=Me(jobs_here.host_name(), os.getpid(), jobs_here.may_live),
                settings=EngineSettings(adopt=run.adopt, again=run.again, comeback=_comeback(run.spec)),
                listings=SharedListings(state, clock),
            )
            return await _watched(run, ports, shown)
    finally:
        ledger.close()


def _comeback(spec: JobSpec) -> Comeback:
    """Return what a new node has to fetch: the plan wrote it into the job's traffic, for later controllers too."""
    return Comeback(critical_gb=spec.wish.traffic.down_gb_h / COMEBACKS_H)


async def _watched(run: Run, ports: EnginePorts, shown: Shown) -> JobEnd | Left:
    """Run the engine beside the display and the signals."""
    ends: list[JobEnd | Left] = []
    async with trio.open_nursery() as nursery:

        async def engine() -> None:
            ends.append(await run_job(run.spec, ports, shown.observe))
            nursery.cancel_scope.cancel()

        def leave(how: Left) -> None:
            ends.append(how)
            nursery.cancel_scope.cancel()

        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            nursery.start_soon(shown.refresh)
            nursery.start_soon(engine)
            asker = _Asker(run, ports.shelf, shown, leave, nursery)
            async for number in signals:
                asker.signalled(number)
    assert ends, "the engine neither ended nor was left"
    return ends[0]


class _Asker:
    """What a signal means: the first Ctrl-C asks, the second leaves."""

    def __init__(
        self, run: Run, shelf: Shelf, shown: Shown, leave: Callable[[Left], None], nursery: trio.Nursery
    ) -> None:
        self._run = run
        self._shelf = shelf
        self._shown = shown
        self._leave = leave
        self._nursery = nursery
        self._asking = False

    def signalled(self, number: int) -> None:
        """Take a signal."""
        if number == signal.SIGTERM or not self._run.interactive or self._asking:
            self._leave(Left.QUIT)
            return
        self._asking = True
        self._nursery.start_soon(self._ask)

    async def _ask(self) -> None:
        with self._shown.paused():
            word = await trio.to_thread.run_sync(ask_terminal, abandon_on_cancel=True)
        self._asking = False
        if word.startswith("l"):
            self._leave(Left.DETACH)
        elif word.startswith("t"):
            await ask_down(self._shelf, self._run.spec.job, "Ctrl-C")


def ask_terminal() -> str:
    """Put the question, and return the answer in lower case; the end of input means leaving."""
    sys.stderr.write(QUESTION)
    sys.stderr.flush()
    answer = sys.stdin.readline()
    return answer.strip().lower() if answer else "l"


async def ask_down(shelf: Shelf, job: str, why: str) -> None:
    """Ask the job's controller, which may be this process, to tear everything down; tries until it is written."""
    body = encode(Request(RequestKind.DOWN, why=why))
    while True:
        try:
            await shelf.put(request_key(job), body)
            return
        except StoreDenied:
            raise
        except StoreUnavailable:
            await trio.sleep(1)
