"""A provider that another package brings: an entry point of the group `spotwarp.providers` names a `Plugin`.

    [project.entry-points."spotwarp.providers"]
    mycloud = "mycloud:PLUGIN"

The entry point's name is the provider's, as in `--providers`. Nothing here imports the command line, so that such a
package needs `provisioner.core` and `provisioner.providers` alone; docs/PROVIDERS.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.core.bootstrap import SelfDestruct
from provisioner.core.ports import Clock, Entropy, Provider


@dataclass(frozen=True, slots=True)
class Place:
    """The machine on which a provider is made, as far as it may know it."""

    environ: Mapping[str, str]
    state_dir: Path
    """A directory of this provider's own; it may not exist yet."""
    clock: Clock
    entropy: Entropy

    def __repr__(self) -> str:
        # The environment holds account keys (P-15).
        return f"Place({self.state_dir})"


@dataclass(frozen=True, slots=True)
class Plugin:
    """What SpotWarp has to know of a provider before it is made."""

    make: Callable[[Place], Provider]
    """Makes it, or raises ProviderDenied when the account's key is missing, BadWish when a setting makes no sense."""
    key_variable: str | None = None
    """The variable that holds the account's key: where it is set, `gc --nodes` asks this provider too."""
    instance_variable: str | None = None
    """The variable by which a container learns its own id, as listings have it. Without one, two instances that one
    create made cannot be told apart once one of them has won, and both stay until the job ends."""
    destroy: SelfDestruct | None = None
    """How a node ends its own rental; None = it cannot, and only a controller or `gc --nodes` can."""
    rents_this_machine: bool = False
    """Nodes are processes here and cost nothing: they run what is installed here instead of the archive for others."""
