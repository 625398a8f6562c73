"""What stands behind an instance: nothing, or a real process. The market speaks to it through this port."""

from __future__ import annotations

from typing import Protocol

from provisioner.simulator.market.instances import Instance


class Nodes(Protocol):
    """Start and end what an instance runs. None of these waits."""

    def start(self, instance: Instance) -> None:
        """Start the instance's program in its directory, which is kept from earlier starts."""

    def warn(self, instance: Instance) -> None:
        """Send SIGTERM: the notice of a provider that gives one."""

    def kill(self, instance: Instance) -> None:
        """Send SIGKILL to the whole group; no process of it is left."""

    def freeze(self, instance: Instance) -> None:
        """Send SIGSTOP to the whole group: a paused container."""

    def thaw(self, instance: Instance) -> None:
        """Send SIGCONT: the container goes on where it was, knowing nothing."""

    def wipe(self, instance: Instance) -> None:
        """Delete the instance's disk."""


class NoNodes:
    """Instances without processes, for worlds in virtual time."""

    def start(self, instance: Instance) -> None:
        """Do nothing."""

    warn = kill = freeze = thaw = wipe = start
