"""This machine as a provider: a node is a process group with a directory of its own, which ends with its first process.

    <base>/<instance id>/record.json   what was rented, without environment or script; written before anything starts
                         pid, exit     of the first process, written by itself
                         ended         destroyed: nothing of it may start any more
                         node.log      what it printed
                         disk/         its HOME, TMPDIR and working directory

Everything is in those files, so a controller that was killed finds its nodes again. A start that races with a destroy
is decided by order: the node writes `pid` and then looks for `ended`, the destroyer writes `ended` and then kills.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from provisioner.core.errors import ProviderUnavailable
from provisioner.core.gpus import Gpu
from provisioner.core.offers import Fuse, Market, Offer, Price
from provisioner.core.ports import (
    Capabilities,
    Clock,
    Created,
    CreateOutcome,
    CreateRefused,
    DeadMan,
    Entropy,
    Instance,
    InstanceStatus,
    Launch,
    RefusedWhy,
)
from provisioner.core.timing import BOOT_LOCAL
from provisioner.core.wishes import Wish
from provisioner.providers.disks import delete_tree
from provisioner.providers.processes import KILL_S, LOOK_EVERY_S, MARK, kill_all, marked, unmount_under
from provisioner.providers.reading import number, text

ID_BYTES: Final = 6
STARTS_WITHIN_S: Final = 10.0
"""A record without a pid after this never started: its creator died in between."""
SCRIPT_BYTES_MAX: Final = 100_000
"""Linux takes 128 KiB as one argument."""
LABEL_CHARS_MAX: Final = 256
KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All that a node gets of the controller's own environment, which holds account keys (P-15)."""

# Arguments: the directory, the seconds it may live (or nothing), the script. `kill 0` is the whole process group.
_FIRST: Final = """\
echo $$ >"$1/pid.tmp" && mv "$1/pid.tmp" "$1/pid" || exit 1
if [ -e "$1/ended" ]; then exit 0; fi
if [ -n "$2" ]; then (sleep "$2"; kill -KILL 0) & fi
/bin/sh -c "$3"
code=$?
echo "$code" >"$1/exit.tmp" && mv "$1/exit.tmp" "$1/exit"
kill -KILL 0
"""


NO_GPU: Final = Gpu("CPU", 0)


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What this machine pretends to rent out."""

    gpu: Gpu = NO_GPU
    gpu_count: int = 1
    slots: int = 4
    """How many nodes at once."""
    spot_usd_h: float = 0.0
    on_demand_usd_h: float | None = None
    location: str = "local"
    disk_gb: float = 1000.0
    fuse: Fuse = Fuse.UNKNOWN
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in every node, as a provider sets variables in its containers."""
    boots: Sequence[str] = ()
    """Shell text that the first nodes run before their script, one each, for tests and demonstrations: `sleep 5` is a
    slow boot, `sleep 1; exit 1` a node that dies in it."""


class Local:
    """A directory of nodes."""

    def __init__(
        self, base: Path, *, clock: Clock, entropy: Entropy, name: str = "local", machine: LocalMachine | None = None
    ) -> None:
        self._base = base.resolve()
        self._clock = clock
        self._entropy = entropy
        self._name = name
        self._machine = LocalMachine() if machine is None else machine
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def name(self) -> str:
        """As in `--providers`: `local`, `local-a`."""
        return self._name

    async def capabilities(self) -> Capabilities:
        """Say what processes can do."""
        return Capabilities(
            spot=True,
            rebid=False,
            stop_start=False,
            dead_man=DeadMan.PROCESS,
            fuse=self._machine.fuse,
            label_chars_max=LABEL_CHARS_MAX,
            script_bytes_max=SCRIPT_BYTES_MAX,
            visible_after_s=0.0,
            create_gap_s=0.0,
            list_gap_s=0.1,
            boot=BOOT_LOCAL,
        )

    async def search(self, wish: Wish) -> Sequence[Offer]:
        """Return what this machine is, in every market of *wish*, while it has a free slot."""
        here = self._machine
        if len(self._directories()) >= here.slots:
            return []
        prices: dict[Market, float] = {Market.SPOT: here.spot_usd_h} if wish.spot else {}
        if here.on_demand_usd_h is not None and wish.on_demand_max_usd_gpu_h is not None:
            prices[Market.ON_DEMAND] = here.on_demand_usd_h
        return [
            Offer(
                provider=self._name,
                offer_id=f"{self._name}-{market.value}",
                gpu=here.gpu,
                gpu_count=here.gpu_count,
                market=market,
                price=Price(usd_h),
                location=here.location,
                disk_gb_max=here.disk_gb,
                reliability=1.0,
                fuse=here.fuse,
                image_cached=True,
                machine_id=self._next_machine(),
                min_bid_usd_h=usd_h if market is Market.SPOT else None,
            )
            for market, usd_h in prices.items()
        ]

    async def create(self, launch: Launch) -> CreateOutcome:
        """Start a node. The image is this machine's own; nothing here can have an unknown outcome."""
        if len(self._directories()) >= self._machine.slots:
            return CreateRefused(RefusedWhy.NO_CAPACITY, f"{self._name}: all {self._machine.slots} slots are taken")
        if len(launch.script.encode()) > SCRIPT_BYTES_MAX:
            return CreateRefused(RefusedWhy.BAD_REQUEST, f"{self._name}: the script is over {SCRIPT_BYTES_MAX} bytes")
        instance_id = self._entropy.token_bytes(ID_BYTES).hex()
        home = self._base / instance_id
        usd_h = launch.offer.price.compute_usd_h if launch.bid_usd_h is None else launch.bid_usd_h
        record = {
            "label": launch.label,
            "market": launch.offer.market.value,
            "usd_h": usd_h,
            "created_at_s": self._clock.now_s(),
            "machine_id": self._next_machine(),
        }
        try:
            # What a node prints or writes may be secret: nobody else on this machine reads it.
            self._base.mkdir(parents=True, exist_ok=True)
            home.mkdir(mode=0o700)
            (home / "disk").mkdir()
            _write_whole(home / "record.json", json.dumps(record))
            self._children[instance_id] = self._start(home, launch)
        except OSError as error:
            # Everything before the start is only files, and a start that failed left no process.
            shutil.rmtree(home, ignore_errors=True)
            return CreateRefused(RefusedWhy.NO_CAPACITY, f"{self._name}: could not start ({error.strerror})")
        return Created(instance_id)

    def _start(self, home: Path, launch: Launch) -> subprocess.Popen[bytes]:
        disk = str(home / "disk")
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {"HOME": disk, "TMPDIR": disk, MARK: str(home)}
        script = f"{self._boot()}\n{launch.script}"
        lives_s = "" if launch.ends_at_s is None else str(max(1, round(launch.ends_at_s - self._clock.now_s())))
        with (home / "node.log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _FIRST, "node", str(home), lives_s, script],
                cwd=disk, env={**kept, **self._machine.environment, **launch.environment, **own},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _boots(self) -> int:
        """Return how many nodes were started here; the count outlives the controller."""
        try:
            return (self._base / "boots").stat().st_size
        except OSError:
            return 0  # none yet, or the base cannot be read, which a create then says

    def _next_machine(self) -> str:
        """Name the machine of the next node: each is on one of its own, so one that fails is no word on the others."""
        return f"{self._name}-{self._boots() + 1}"

    def _boot(self) -> str:
        """Count a node, and return what it does before its script."""
        number = self._boots()
        with (self._base / "boots").open("ab") as counted:
            counted.write(b".")
        return self._machine.boots[number] if number < len(self._machine.boots) else ""

    async def list_instances(self) -> Sequence[Instance]:
        """Return every node; of one whose first process has ended, whatever is left is ended too."""
        return [instance for home in self._directories() if (instance := await self._look(home)) is not None]

    async def show(self, instance_id: str) -> Instance | None:
        """Return one node."""
        home = self._home(instance_id)
        return await self._look(home) if home is not None else None

    async def destroy(self, instance_id: str) -> None:
        """Kill a node and delete its disk; returns when both are done."""
        home = self._home(instance_id)
        if home is None:
            return
        try:
            (home / "ended").touch()
        except FileNotFoundError:
            return
        if not await kill_all(str(home)) or not await unmount_under(home):
            raise ProviderUnavailable(f"{self._name}: destroy: {instance_id} still runs or is mounted; try again later")
        await self._reap(instance_id)
        try:
            # The record goes last, so that a deletion that is cut short is listed, and repeated.
            if (home / "disk").exists():
                delete_tree(home / "disk")
            shutil.rmtree(home)
        except FileNotFoundError:
            # Another controller's destroy was faster.
            pass
        except OSError as error:
            problem = f"the disk of {instance_id} cannot be deleted ({error.strerror})"
            raise ProviderUnavailable(f"{self._name}: destroy: {problem}; try again later") from error

    async def balance_usd(self) -> float | None:
        """Return None: nothing is paid."""
        return None

    async def aclose(self) -> None:
        """Let go of the nodes, which live on."""
        for child in self._children.values():
            if child.poll() is None:
                child.returncode = 0  # the interpreter would warn of a child that is still there, as is wanted here
        self._children.clear()

    def _directories(self) -> list[Path]:
        """Return the nodes' directories, those being deleted included; raise when they cannot be read."""
        try:
            return sorted(record.parent for record in self._base.glob("*/record.json"))
        except OSError as error:
            raise ProviderUnavailable(f"{self._name}: {self._base} cannot be read ({error.strerror})") from error

    def _home(self, instance_id: str) -> Path | None:
        """Return a node's directory; an id that is none of ours names nothing, whatever path it looks like."""
        whole = len(instance_id) == 2 * ID_BYTES and set(instance_id) <= set("0123456789abcdef")
        home = self._base / instance_id
        return home if whole and home.is_dir() else None

    async def _reap(self, instance_id: str) -> None:
        """Take the exit of a killed child, so that no zombie stays: its memory goes a moment before it ends."""
        child = self._children.pop(instance_id, None)
        with trio.move_on_after(KILL_S):
            while child is not None and child.poll() is None:
                await trio.sleep(LOOK_EVERY_S)

    async def _look(self, home: Path) -> Instance | None:
        record = _record(home)
        if record is None:
            return None
        if (child := self._children.get(home.name)) is not None:
            child.poll()
        status, words = self._status(home, record)
        if status is InstanceStatus.FAILED:
            await kill_all(str(home))
        return Instance(
            provider=self._name,
            instance_id=home.name,
            label=text(record.get("label")),
            status=status,
            status_text=words,
            market=Market(record["market"]),
            usd_h=number(record.get("usd_h")),
            gpu=self._machine.gpu,
            gpu_count=self._machine.gpu_count,
            machine_id=text(record.get("machine_id")) or None,
            location=self._machine.location,
            created_at_s=number(record.get("created_at_s")),
        )

    def _status(self, home: Path, record: Mapping[str, Any]) -> tuple[InstanceStatus, str]:
        pid, code = _read(home / "pid"), _read(home / "exit")
        if code is not None:
            return InstanceStatus.FAILED, f"exited with {code}"
        if pid is not None:
            if int(pid) in marked().get(str(home), set()):
                return InstanceStatus.RUNNING, "running"
            # It may have ended by itself between the two looks.
            code = _read(home / "exit")
            return InstanceStatus.FAILED, "killed" if code is None else f"exited with {code}"
        child = self._children.get(home.name)
        young = self._clock.now_s() - (number(record.get("created_at_s")) or 0.0) < STARTS_WITHIN_S
        if young and (child is None or child.returncode is None):
            return InstanceStatus.CREATING, "starting"
        return InstanceStatus.FAILED, "never started"


def _write_whole(path: Path, content: str) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_suffix(".tmp")
    part.write_text(content)
    part.replace(path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def _record(home: Path) -> dict[str, Any] | None:
    """Return a node's record, or None for one whose directory is just being deleted."""
    try:
        record: dict[str, Any] = json.loads((home / "record.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ProviderUnavailable(f"the record of the local node {home.name} cannot be read; delete {home}") from error
    return record
