"""Look around on this node for what a run is started with: interpreter, packages, git, GPU.

Invariant: nothing here is necessary; what cannot be found out in time stays empty, and no secret is kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from spotwarp_fs.core.provenance import DIFF_BYTES_MAX, Provenance
from spotwarp_fs.core.secrets import masked_command, masked_text, split_environment

ASK_TIMEOUT_S: Final = 15.0
PASSING: Final = frozenset({"_", "OLDPWD", "SHLVL", "SPOTWARP_RESUMED", "SPOTWARP_RESTORED_FROM"})
"""Variables of one moment: the same run again is the same record."""
SHEBANG_BYTES_MAX: Final = 256
_PYTHON: Final = re.compile(r"python[0-9.]*")
_PACKAGES: Final = (
    "import json,sys,importlib.metadata as m\n"
    "found={str(d.metadata['Name']):str(d.version) for d in m.distributions()}\n"
    "print(json.dumps([sys.version.split()[0],found]))"
)


def gather(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Provenance:
    """Describe a command that is about to be started in *directory* with *environment*; takes a second or so."""
    shown, secrets = split_environment({name: environment[name] for name in environment.keys() - PASSING})
    known = [environment[name] for name in secrets]
    python, packages = _python(command, environment)
    commit, diff, cut = _git(directory, environment)
    gpus, driver = _gpus(environment)
    return Provenance(
        command=masked_command(command, known),
        directory=str(directory),
        python=python,
        packages=packages,
        git_commit=commit,
        git_diff=masked_text(diff, known),
        git_diff_cut=cut,
        environment=shown,
        secrets=secrets,
        gpus=gpus,
        driver=driver,
    )


def interpreter_of(command: Sequence[str], path: str | None = None) -> str | None:
    """Return the Python that runs a command: itself, or the one in its first line, as for `torchrun`."""
    found = shutil.which(command[0], path=path)
    if found is None:
        return None
    if _PYTHON.fullmatch(os.path.basename(found)):
        return found
    try:
        with open(found, "rb") as file:
            first = file.read(SHEBANG_BYTES_MAX).partition(b"\n")[0]
    except OSError:
        return None
    words = os.fsdecode(first.removeprefix(b"#!")).split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [shutil.which(word, path=path) or "" for word in words[1:2]]
    return words[0] if words and _PYTHON.fullmatch(os.path.basename(words[0])) else None


def _python(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    interpreter = interpreter_of(command, environment.get("PATH"))
    said = _ask([interpreter, "-c", _PACKAGES], Path("/"), environment) if interpreter else b""
    try:
        version, packages = json.loads(said)
        return str(version), dict(sorted(packages.items()))
    except (ValueError, TypeError, AttributeError):
        return "", {}


def _git(directory: Path, environment: Mapping[str, str]) -> tuple[str, str, bool]:
    git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    commit = _ask([*git, "rev-parse", "--verify", "HEAD"], directory, environment).decode(errors="replace").strip()
    if not commit:
        return "", "", False
    diff = _ask([*git, "diff", "HEAD", "--no-ext-diff", "--no-color"], directory, environment)
    return commit, diff[:DIFF_BYTES_MAX].decode(errors="replace"), len(diff) > DIFF_BYTES_MAX


def _gpus(environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = _ask(query, Path("/"), environment).decode(errors="replace").splitlines()
    pairs = [line.rpartition(", ") for line in lines if ", " in line]
    return tuple(name.strip() for name, _, _ in pairs), pairs[0][2].strip() if pairs else ""


def _ask(command: list[str], directory: Path, environment: Mapping[str, str]) -> bytes:
    """Return the standard output of a command that succeeds in time; nothing otherwise."""
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        return b""
    try:
        done = subprocess.run(
            [program, *command[1:]], cwd=directory, env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=ASK_TIMEOUT_S, check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
