"""What is started: the program with its arguments, its directory, and what it is told by its environment.

Invariant: a program that cannot be there is refused before anything is mounted (exit code 127, as a shell says it).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotwarp_fs.cli.mounts import current_records
from spotwarp_fs.cli.running.wish import RunWish
from spotwarp_fs.cli.sources import INSIDE_RUN, TOLD_BY_RUN
from spotwarp_fs.core.errors import SpotwarpError

if TYPE_CHECKING:
    from spotwarp_fs.cli.sources import LoadedSettings

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
GIVEN_BACK: Final = "SPOTWARP_INTERNAL_GIVE_"
"""Before the name of a variable that is the command's alone: another Python's PYTHONPATH would break our own."""


class NoCommand(SpotwarpError):
    """The command cannot be started; `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int = NOT_FOUND) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and the directory that it starts in."""

    argv: tuple[str, ...]
    directory: Path
    """Named, never held: what is mounted there later is what the command sees."""


def command_of(wish: RunWish, workspace: Path) -> Command:
    """Work out what is to be started; the command's directory is the workspace if `run` was typed in it."""
    typed_in = Path(os.path.realpath(wish.typed_in))
    directory = workspace if typed_in == workspace else typed_in
    if wish.script is None:
        return Command(wish.command, directory)
    return Command((sys.executable, wish.script, *wish.command), directory)


def check_before(command: Command, wish: RunWish, workspace: Path) -> None:
    """Raise NoCommand for what cannot be started, unless it may come with the workspace."""
    program = wish.script if wish.script is not None else command.argv[0]
    by_path = wish.script is not None or "/" in program
    if by_path and _is_below(os.path.normpath(command.directory / program), workspace):
        return
    check_now(command, wish)


def check_now(command: Command, wish: RunWish) -> None:
    """Raise NoCommand if the program, or the script, is not there."""
    if wish.script is not None:
        if not (command.directory / wish.script).is_file():
            raise NoCommand(f"there is no script {wish.script} in {command.directory}")
        return
    program = command.argv[0]
    if "/" not in program:
        if shutil.which(program) is None:
            raise NoCommand(f"there is no program {program!r} in PATH")
        return
    path = command.directory / program
    if not path.is_file():
        raise NoCommand(f"there is no program {path}")
    if not os.access(path, os.X_OK):
        raise NoCommand(f"{path} is not executable; chmod +x it, or name its interpreter", NOT_EXECUTABLE)


def environment_of(
    environ: Mapping[str, str], loaded: LoadedSettings, workspace: Path, checkpoints: Path, resumed_from: int | None
) -> dict[str, str]:
    """Return the command's environment: ours, and what it is told about its workspace."""
    told = {
        "SPOTWARP_WORKSPACE": str(workspace),
        "SPOTWARP_CHECKPOINT_DIR": str(checkpoints),
        INSIDE_RUN: "0" if resumed_from is None else "1",
        "SPOTWARP_RESTORED_FROM": "" if resumed_from is None else str(resumed_from),
    }
    assert told.keys() > TOLD_BY_RUN
    if loaded.source("state_dir").kind == "flag":
        # `spotwarp sync` and `status` inside the command look there for the mount.
        told["SPOTWARP_STATE_DIR"] = str(loaded.settings.state_dir)
        if loaded.config_found:
            told["SPOTWARP_CONFIG"] = str(loaded.config_path)
    kept = {name: value for name, value in environ.items() if not name.startswith(GIVEN_BACK)}
    given_back = {
        name.removeprefix(GIVEN_BACK): value for name, value in environ.items() if name.startswith(GIVEN_BACK)
    }
    return {**kept, **given_back, **told}


def refuse_nested(environ: Mapping[str, str], workspace: Path, state_dir: Path) -> None:
    """Raise SpotwarpError inside another served workspace, or around one: the states of one would hold the other."""
    outer = environ.get("SPOTWARP_WORKSPACE", "") if INSIDE_RUN in environ else ""
    if outer.startswith("/") and (_is_below(str(workspace), Path(outer)) or _is_below(outer, workspace)):
        raise SpotwarpError(
            f"{workspace} belongs to the workspace {outer} of the `spotwarp run` that this command was started by: run "
            "the inner command without `spotwarp run`, or name another directory with --workspace"
        )
    for record in current_records(state_dir):
        inside = _is_below(str(workspace), Path(record.mountpoint))
        if record.mountpoint != str(workspace) and (inside or _is_below(record.mountpoint, workspace)):
            raise SpotwarpError(
                f"{workspace} and the workspace {record.workspace} at {record.mountpoint} lie one within the other: "
                "name another directory with --workspace"
            )


def _is_below(path: str, directory: Path) -> bool:
    return path == str(directory) or path.startswith(str(directory).rstrip("/") + "/")
