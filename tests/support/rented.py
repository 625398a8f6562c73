"""Nodes of the local provider with the real agent, and a few lines that stand for the controller."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from provisioner.bundling.bundle import Bundle, make_light_bundle, upload_bundle
from provisioner.core import rendezvous
from provisioner.core.bootstrap import Bootstrap, render
from provisioner.core.gpus import parse_gpu
from provisioner.core.jobs import JobSpec, Limits, encode_spec
from provisioner.core.ports import Created, InstanceStatus, Launch
from provisioner.core.rendezvous import Controller, NodePhase, Orders, Report
from provisioner.core.wishes import Wish
from provisioner.meeting import StoreShelf, StoreWorkspace
from provisioner.providers.local import Local, LocalMachine
from provisioner.providers.processes import MARK
from spotwarp_fs import api
from tests.support.providers import SystemClock, SystemEntropy

JOB = "job"
WORKSPACE = "work"
PATIENCE_S = 90.0


@dataclass
class Rented:
    """One node: its intent, its directory, and what was last said to it."""

    controller: Controlling
    ident: str
    instance_id: str
    orders: Orders = field(default_factory=lambda: Orders(controller_epoch=1, seq=0))

    @property
    def home(self) -> Path:
        """The agent's own directory."""
        return self.disk / f"spotwarp-{self.ident}"

    @property
    def disk(self) -> Path:
        return self.controller.base / self.instance_id / "disk"

    @property
    def place(self) -> Path:
        """The workspace on it."""
        return self.disk / "workspace"

    async def order(self, **words: object) -> None:
        self.orders = replace(self.orders, seq=self.orders.seq + 1, **words)  # type: ignore[arg-type]
        key = rendezvous.orders_key(JOB, self.ident)
        await self.controller.shelf.put(key, rendezvous.encode(self.orders))

    async def report(self) -> Report | None:
        body = await self.controller.shelf.get(rendezvous.report_key(JOB, self.ident))
        return None if body is None else rendezvous.decode(Report, body)

    async def until(self, *phases: NodePhase) -> Report:
        """Wait until the node says one of *phases*."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            report = await self.report()
            if report is not None and report.phase in phases:
                return report
            assert time.monotonic() < deadline, f"{report} and not {phases}\n{self.story()}"
            await trio.sleep(0.1)

    async def until_true(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.story()}"
            await trio.sleep(0.05)

    async def until_exit(self) -> int:
        """Wait for the end of the rental; gives what the agent ended with. Destroying itself leaves no exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while (row := await self.controller.provider.show(self.instance_id)) is None or (
            row.status is not InstanceStatus.FAILED
        ):
            assert time.monotonic() < deadline, f"{row}\n{self.story()}"
            await trio.sleep(0.1)
        found = re.search(r": run ended with (\d+)$", self.story(), re.MULTILINE)
        assert found is not None, self.story()
        return int(found[1])

    async def log(self) -> str:
        """What the node has uploaded of the command's output."""
        return (await self.controller.shelf.get(rendezvous.log_key(JOB, self.ident)) or b"").decode()

    def story(self) -> str:
        path = self.controller.base / self.instance_id / "node.log"
        said = path.read_text(errors="replace")[-6000:] if path.exists() else ""
        logs = "".join(found.read_text()[-2000:] for found in self.home.rglob("daemon.log"))
        return f"{said}\n--- daemon\n{logs}"


@dataclass
class Controlling:
    """What stands for a controller."""

    base: Path
    store: api.Store
    shelf: StoreShelf
    view: StoreWorkspace
    provider: Local
    bundle: Bundle
    told: api.NodeSettings
    spec: JobSpec
    rented: list[Rented] = field(default_factory=list)

    async def rent(self, **variables: str) -> Rented:
        ident = f"00c0ffee-{len(self.rented) + 1}"
        boot = Bootstrap(ident, ("run", "--job", JOB), self.bundle.sha256, None)
        environment = {
            "SPOTWARP_BUNDLE_URL": await self.shelf.link(self.bundle.key, 600),
            **self.told.variables, **self.told.secrets, **variables,
        }  # fmt: skip
        (offer,) = await self.provider.search(self.spec.wish)
        launch = Launch(f"sw-{JOB}-{ident}", offer, "", 10.0, render(boot), environment)
        created = await self.provider.create(launch)
        assert isinstance(created, Created), created
        self.rented.append(Rented(self, ident, created.instance_id))
        return self.rented[-1]

    def resume(self, node: Rented) -> subprocess.Popen[bytes]:
        """Start a node's script again on the disk it had, as a provider does long after the URL has ended."""
        home = node.disk.parent
        script = render(Bootstrap(node.ident, ("run", "--job", JOB), self.bundle.sha256, None))
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(node.disk), "TMPDIR": str(node.disk), MARK: str(home),
            **self.told.variables, **self.told.secrets,
        }  # fmt: skip
        with (home / "node.log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", script], env=environment, cwd=node.disk, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    async def set(self, **fields: object) -> None:
        """Change the job's spec before a node is rented."""
        self.spec = replace(self.spec, **fields)  # type: ignore[arg-type]
        await self.shelf.put(rendezvous.spec_key(JOB), encode_spec(self.spec))

    async def beat(self) -> None:
        """Be alive."""
        seq = 0
        while True:
            seq += 1
            body = Controller(1, "test", os.getpid(), 0.0, seq)
            await self.shelf.put(rendezvous.alive_key(JOB), rendezvous.encode(body))
            await trio.sleep(1.0)

    async def epoch(self) -> int:
        """The newest writer epoch; 0 before there is a state."""
        head = await self.view.head()
        return 0 if head is None else head.writer_epoch

    async def permit(self, node: Rented) -> None:
        await node.order(permit_writer_epoch=await self.epoch() + 1)


@asynccontextmanager
async def controlling(
    tmp_path: Path, command: tuple[str, ...], environ: Mapping[str, str] | None = None, *, form: str = "directory"
) -> AsyncIterator[Controlling]:
    """Have a job in a store, and a provider; everything is gone afterwards."""
    given = {"SPOTWARP_STORE": f"file://{tmp_path / 'store'}", "SPOTWARP_STATE_DIR": str(tmp_path / "state")}
    loaded = api.load_settings(environ={**given, "SPOTWARP_NOTICE_TIMEOUT": "20s", **(environ or {})})
    store = api.Store(loaded.settings)
    shelf = StoreShelf(store)
    spec = JobSpec(
        job=JOB, workspace=WORKSPACE, command=command, providers=("local",), wish=Wish(parse_gpu("CPU")),
        interval="1s", form=form, limits=Limits(crashes_max=1), store_floor_mbps=0.01,
    )  # fmt: skip
    bundle = make_light_bundle(tmp_path / "bundles")
    await upload_bundle(shelf, bundle)
    provider = Local(tmp_path / "nodes", clock=SystemClock(), entropy=SystemEntropy(), machine=LocalMachine(slots=8))
    made = Controlling(
        tmp_path / "nodes", store, shelf, StoreWorkspace(store, WORKSPACE), provider, bundle,
        await api.node_settings(loaded), spec,
    )  # fmt: skip
    await made.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.beat)
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                for instance in await provider.list_instances():
                    await provider.destroy(instance.instance_id)
                await store.aclose()
