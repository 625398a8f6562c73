"""What this node is for, and where its things lie: from the environment, the arguments and the job's spec.

    <home>/              made by the bootstrap script; on a zombie that was resumed it is the same one
        alive            touched while somebody lives (dead-man switch)
        state/           SpotWarp's state directory, cache and logs
        permit, permit.* how `spotwarp run` is told and tells (its `--permit`)
        place            the workspace's directory, as it was chosen at the first start

Invariant: the environment of `spotwarp run` holds the settings and the job's secrets, and none of what only the agent
or the bootstrap script needs: a container's key for itself among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from provisioner.core.errors import BadWish

INSTANCE_VARIABLES: Final = ("CONTAINER_ID", "RUNPOD_POD_ID")
"""Where Vast and RunPod tell a container its own id."""
LOCAL_VARIABLE: Final = "LOCAL_NODE"
"""The directory of a node of the local provider; its last part is the id."""
PLUGGED_VARIABLES: Final = "SPOTWARP_INTERNAL_PROVIDER"
"""Of a provider that another package brings: the names of its variables with the id and the key, as `ID,KEY`."""
OWN_KEYS: Final = ("CONTAINER_API_KEY", "RUNPOD_API_KEY")
"""Keys by which a container may end itself: for the bootstrap script alone."""
OF_THE_AGENT: Final = (
    "SPOTWARP_INTENT", "SPOTWARP_ALIVE", "SPOTWARP_HOME", "SPOTWARP_BUNDLE_URL", "SPOTWARP_BOOT", "SPOTWARP_PLACE",
)  # fmt: skip
PYTHONS: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""The image's own, for the command alone."""
GIVE: Final = "SPOTWARP_INTERNAL_GIVE_"
"""`spotwarp run` gives what is named so to its command, without this prefix, and does not use it itself."""
SECRET_WORDS: Final = ("SECRET", "TOKEN", "PASSWORD", "API_KEY", "ACCESS_KEY")
SECRET_CHARS_MIN: Final = 6
USUAL_PLACE: Final = Path("/workspace")


@dataclass(frozen=True, slots=True)
class Errand:
    """One node's task."""

    ident: str
    job: str
    home: Path
    instance_id: str
    self_destruct: str
    run_environment: Mapping[str, str] = field(repr=False)
    secrets: frozenset[str] = field(repr=False)
    """Values that are masked in what is uploaded as the command's output."""
    wanted_place: str | None = None
    """Where the workspace is to lie, if somebody said so."""
    local: bool = False

    @property
    def alive(self) -> Path:
        """The dead-man switch's file."""
        return self.home / "alive"

    @property
    def permit(self) -> Path:
        """What `spotwarp run` waits for."""
        return self.home / "permit"


def read_errand(job: str, environ: Mapping[str, str]) -> Errand:
    """Read the environment that the bootstrap script and the provider have made, or raise BadWish."""
    try:
        ident, alive = environ["SPOTWARP_INTENT"], Path(environ["SPOTWARP_ALIVE"])
    except KeyError as error:
        raise BadWish(f"{error.args[0]} is not set: this is started by a rented node's start script") from None
    home = alive.absolute().parent
    local = environ.get(LOCAL_VARIABLE, "")
    ids, keys = _providers_variables(environ)
    instance_id = next((environ[name] for name in ids if environ.get(name)), Path(local).name)
    dropped = {*OF_THE_AGENT, *keys, PLUGGED_VARIABLES}
    kept = {name: value for name, value in environ.items() if name not in dropped}
    for name in PYTHONS:
        if name in kept:
            kept[f"{GIVE}{name}"] = kept.pop(name)
    return Errand(
        ident=ident,
        job=job,
        home=home,
        instance_id=instance_id,
        self_destruct=_self_destruct(environ),
        run_environment={**kept, "SPOTWARP_STATE_DIR": str(home / "state")},
        secrets=_secrets(environ),
        wanted_place=environ.get("SPOTWARP_PLACE"),
        local=bool(local),
    )


def _providers_variables(environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the variables that may hold the instance's id, and of those with its key, in pairs."""
    instance, _, key = environ.get(PLUGGED_VARIABLES, "").partition(",")
    return (*INSTANCE_VARIABLES, instance), (*OWN_KEYS, key)


def _self_destruct(environ: Mapping[str, str]) -> str:
    ids, keys = _providers_variables(environ)
    for key, of in zip(keys, ids, strict=True):
        if environ.get(key) and (environ.get(of) or not of):
            return f"by the key in {key}"
    if environ.get(LOCAL_VARIABLE):
        return "by the end of its processes"
    known = ", ".join(key for key in keys if key)
    return f"cannot: the container has none of {known}; its processes end, its rental does not"


def _secrets(environ: Mapping[str, str]) -> frozenset[str]:
    words = (*SECRET_WORDS, *(key for key in _providers_variables(environ)[1] if key))
    named = {value for name, value in environ.items() if any(word in name.upper() for word in words)}
    return frozenset(value for value in named if len(value) >= SECRET_CHARS_MIN)


def choose_place(errand: Errand) -> Path:
    """Return the workspace's directory: always the same one on this node, and on other nodes if it can be.

    Absolute paths inside a workspace (virtual environments, a trainer's state) stay right only if it lies where it lay.
    """
    note = errand.home / "place"
    if note.exists():
        return Path(note.read_text())
    place = Path(errand.wanted_place) if errand.wanted_place else _usual(errand)
    draft = note.with_suffix(".tmp")
    draft.write_text(str(place))
    draft.replace(note)
    return place


def _usual(errand: Errand) -> Path:
    own = Path(errand.run_environment.get("HOME") or errand.home) / "workspace"
    if errand.local:
        return own
    try:
        USUAL_PLACE.mkdir(exist_ok=True)
        usable = os.access(USUAL_PLACE, os.W_OK) and not any(USUAL_PLACE.iterdir())
    except OSError:
        usable = False
    return USUAL_PLACE if usable else own
