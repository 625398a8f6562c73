"""A real process group behind each instance, so that a node really boots and really dies (providers.md 7.2, 7.4).

The command is one shell line, the same for every instance; what is particular comes in its environment: the variables
that the order set, the ones that the provider sets in its containers (providers.md 1.7 and 2.4), and `SIM_…`. Each
instance has a directory of its own, its working directory and HOME, which lives as long as its disk. The names do not
begin with SPOTWARP_, because the program refuses variables of its own prefix that it does not know.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from provisioner.providers.processes import marked
from provisioner.simulator.market.instances import Instance

MARK = "SIM_HOME"
"""In the environment of everything that an instance runs: its directory."""
LOOK_EVERY_S = 0.05
WAIT_FOR_KILLED_S = 10.0
KEPT_FROM_OUTSIDE = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
LOG_NAME = "container.log"


class ProcessNodes:
    """Start, freeze and kill the instances' process groups."""

    def __init__(self, command: str, base: Path, *, url: str, extra: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._base = base
        self._url = url
        self._extra = dict(extra or {})
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, instance: Instance) -> None:
        """Start the command in the instance's directory, in a session of its own."""
        self.kill(instance)
        home = self.home(instance)
        home.mkdir(parents=True, exist_ok=True)
        (home / "onstart.sh").write_text(instance.order.command)
        with (home / LOG_NAME).open("ab") as log:
            self._running[instance.key] = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                cwd=home, env=self.environment(instance), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def warn(self, instance: Instance) -> None:
        """Send SIGTERM to the group."""
        self._signal(instance, signal.SIGTERM)

    def freeze(self, instance: Instance) -> None:
        """Send SIGSTOP to the group."""
        self._signal(instance, signal.SIGSTOP)

    def thaw(self, instance: Instance) -> None:
        """Send SIGCONT to the group."""
        self._signal(instance, signal.SIGCONT)

    def kill(self, instance: Instance) -> None:
        """Send SIGKILL to everything in the container and collect its leader."""
        self._signal(instance, signal.SIGKILL)
        _kill_marked(str(self.home(instance)))
        if (process := self._running.pop(instance.key, None)) is not None:
            process.wait(timeout=WAIT_FOR_KILLED_S)

    def wipe(self, instance: Instance) -> None:
        """Delete the instance's directory."""
        shutil.rmtree(self.home(instance), ignore_errors=True)

    def home(self, instance: Instance) -> Path:
        """Return the instance's directory."""
        return self._base / instance.key.replace(":", "-")

    def log(self, key: str) -> str:
        """Return what the instance of that key has printed, or nothing."""
        path = self._base / key.replace(":", "-") / LOG_NAME
        return path.read_text(errors="replace") if path.exists() else ""

    def pids(self) -> dict[str, int]:
        """Return the process groups that run, by instance key."""
        return {key: process.pid for key, process in self._running.items() if process.poll() is None}

    async def watch(self, exited: Callable[[str, int], None]) -> None:
        """Report every program that ends by itself. Never returns."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            for key, process in list(self._running.items()):
                if (code := process.poll()) is not None:
                    _signal_group(process.pid, signal.SIGKILL)  # what the program left behind in its container
                    _kill_marked(str(self._base / key.replace(":", "-")))
                    del self._running[key]
                    exited(key, code)

    def kill_all(self) -> None:
        """Kill whatever is left, once nothing can start any more."""
        for key, process in self._running.items():
            _signal_group(process.pid, signal.SIGKILL)
            _kill_marked(str(self._base / key.replace(":", "-")))
            process.wait(timeout=WAIT_FOR_KILLED_S)
        self._running.clear()

    def environment(self, instance: Instance) -> dict[str, str]:
        """Return the container's environment."""
        home, order, machine = self.home(instance), instance.order, instance.machine
        kept = {name: os.environ[name] for name in KEPT_FROM_OUTSIDE if name in os.environ}
        wrong, slow = instance.fate.get("wrong_gpu", {}), instance.fate.get("slow_network", {})
        own = {
            "HOME": str(home),
            "TMPDIR": str(home),
            MARK: str(home),
            "SIM_URL": self._url,
            "SIM_PROVIDER": order.provider,
            "SIM_INSTANCE": instance.key,
            "SIM_ONSTART": str(home / "onstart.sh"),
            "SIM_ARGS": " ".join(str(part) for part in order.asked.get("args") or []),
            "SIM_GPU_NAME": str(wrong.get("gpu", machine.gpu.display_name)),
            "SIM_GPU_COUNT": str(wrong.get("count", order.gpus)),
            "SIM_GPU_MEMORY_GB": str(machine.gpu.memory_gb),
            "SIM_CUDA": str(wrong.get("cuda", machine.cuda)),
            "SIM_UP_MBPS": str(slow.get("mbps", machine.up_mbps)),
            "SIM_DOWN_MBPS": str(slow.get("mbps", machine.down_mbps)),
        }
        return {**kept, **self._extra, **own, **_given_by_provider(instance), **order.env}

    def _signal(self, instance: Instance, number: signal.Signals) -> None:
        if (process := self._running.get(instance.key)) is not None:
            _signal_group(process.pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    # The group may be gone already: its leader was collected and nobody else was left.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _kill_marked(home: str) -> None:
    """Kill what moved to a session of its own, as daemons do, until nothing is left: a container's end takes it too."""
    while pids := marked(MARK).get(home):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _given_by_provider(instance: Instance) -> dict[str, str]:
    """Return what the provider puts into its containers: their identity and a key for themselves alone."""
    if instance.order.provider == "vast":
        return {
            "CONTAINER_ID": instance.ident,
            "CONTAINER_API_KEY": instance.instance_key,
            "VAST_CONTAINERLABEL": f"C.{instance.ident}",
            "PUBLIC_IPADDR": "127.0.0.1",
            "VAST_TCP_PORT_22": str(instance.port_base),
            "GPU_COUNT": str(instance.order.gpus),
        }
    return {
        "RUNPOD_POD_ID": instance.ident,
        "RUNPOD_API_KEY": instance.instance_key,
        "RUNPOD_DC_ID": instance.machine.place,
        "RUNPOD_PUBLIC_IP": "127.0.0.1",
        "RUNPOD_TCP_PORT_22": str(instance.port_base),
        "RUNPOD_GPU_COUNT": str(instance.order.gpus),
    }
