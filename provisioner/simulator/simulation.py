"""Put a simulator together and keep it going: the world, its front ends, its processes, and a server if wanted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from provisioner.simulator.app import App
from provisioner.simulator.calls import FrontEnd
from provisioner.simulator.clock import SimClock
from provisioner.simulator.control import PREFIX, Control
from provisioner.simulator.latencies import Latencies
from provisioner.simulator.market.nodes import Nodes, NoNodes
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.market.world import World
from provisioner.simulator.processes import ProcessNodes
from provisioner.simulator.runpod.graph import GraphFront
from provisioner.simulator.runpod.v1 import V1Front
from provisioner.simulator.runpod.v2_front import V2Front
from provisioner.simulator.server import Server
from provisioner.simulator.transport import InProcessTransport
from provisioner.simulator.vast.front import VastFront
from provisioner.simulator.wire import Reply, Request

EXEC_VARIABLE = "SPOTWARP_SIM_EXEC"
"""Names the shell command that every instance runs; without it instances run nothing."""

LOOPBACK = "127.0.0.1"


class Simulator:
    """A running simulator."""

    def __init__(
        self, app: App, control: Control, nursery: trio.Nursery, processes: ProcessNodes | None, url: str
    ) -> None:
        self.app = app
        self.world = app.world
        self.clock = app.clock
        self.control = control
        self.processes = processes
        self.url = url
        """The server's address, or one that only the in-process transport understands."""
        self.transport = InProcessTransport(self.answer, app.clock, nursery)
        """For httpx clients in this process and this trio run."""

    async def answer(self, request: Request) -> Reply:
        """Answer a request of a provider's client or of a test."""
        return await answering(self.app, self.control)(request)

    def addresses(self) -> dict[str, str]:
        """Return where each provider's client has to be pointed (providers.md 7.1)."""
        return {
            "url": self.url,
            "vast_url": self.url,
            "runpod_api_base_url": self.url,
            "runpod_graphql_url": f"{self.url}/graphql",
            "runpod_v2": f"{self.url}/v2",
            "runpod_v1": f"{self.url}/v1",
            "control": f"{self.url}{PREFIX}",
        }


def answering(app: App, control: Control) -> Callable[[Request], Awaitable[Reply]]:
    """Return the function that answers both the providers' requests and the simulator's own."""

    async def answer(request: Request) -> Reply:
        if request.path.startswith(PREFIX):
            reply = control.answer(request)
            app.clock.poke()
            return reply
        return await app.answer(request)

    return answer


@asynccontextmanager
async def simulating(
    scenario: Scenario,
    *,
    scale: float = 1.0,
    latencies: Latencies | None = None,
    port: int | None = None,
    nodes_dir: Path | None = None,
    command: str | None = None,
    extra_env: Mapping[str, str] | None = None,
    nodes: Nodes | None = None,
) -> AsyncIterator[Simulator]:
    """Run a simulator for the time of a `with` block, and leave no process of it behind.

    Time passes *scale* times as fast as trio's clock. With *port* (0 picks one) it serves HTTP on loopback. With
    *nodes_dir* and a command (given, or from SPOTWARP_SIM_EXEC) each instance is a real process group; with *nodes*,
    whatever the caller starts and ends for it, which tells `world.exited` when it ends by itself.
    """
    clock = SimClock(scale=scale, start_unix_s=scenario.start_unix_s)
    world = World(scenario, latencies)
    fronts: list[FrontEnd] = [VastFront(world), V2Front(world), GraphFront(world), V1Front(world)]
    app = App(world, clock, fronts)
    listeners = [] if port is None else await trio.open_tcp_listeners(port, host=LOOPBACK)
    url = f"http://{LOOPBACK}:{listeners[0].socket.getsockname()[1]}" if listeners else "http://simulator"
    command = command or os.environ.get(EXEC_VARIABLE)
    processes = ProcessNodes(command, nodes_dir, url=url, extra=extra_env) if command and nodes_dir else None
    world.lives.nodes = nodes or processes or NoNodes()
    control = Control(app, processes)
    try:
        async with trio.open_nursery() as nursery:
            if processes is not None:
                nursery.start_soon(processes.watch, _exited(app))
            nursery.start_soon(app.pump)
            if listeners:
                server = Server(answering(app, control), clock)
                nursery.start_soon(trio.serve_listeners, server.connection, listeners)
            try:
                yield Simulator(app, control, nursery, processes, url)
            finally:
                nursery.cancel_scope.cancel()
    finally:
        if processes is not None:
            processes.kill_all()


def _exited(app: App) -> Callable[[str, int], None]:
    def exited(key: str, code: int) -> None:
        app.catch_up()
        app.world.exited(key, code)
        app.clock.poke()

    return exited
