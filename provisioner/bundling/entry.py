"""The text of `node.py`, the archive's entry: give the interpreter that runs it our packages, and nothing else.

It makes the shape of a virtual environment (`pyvenv.cfg`, a link to the interpreter, `site-packages`) beside itself,
without pip, venv or compiler, and starts the agent in it. So the image's own packages are neither seen nor touched, and
the command that the node runs later finds the image's Python as it was.

Invariant: it uses only what every CPython from 3.11 on has, and may be started again at any moment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAME: Final = "node.py"
COMMON: Final = "site-common"
"""Packages that every CPython can use."""


def site_of(version: str) -> str:
    """Return the directory of what only CPython *version*, as in 3.12, can use."""
    return f"site-{version}"


@dataclass(frozen=True, slots=True)
class Here:
    """An interpreter of this very machine, for nodes on it."""

    interpreter: str
    """The one behind any virtual environment."""
    version: str
    paths: tuple[str, ...]
    """Where its packages are."""


_TEMPLATE: Final = '''\
"""Start SpotWarp's agent on this node. Made by the controller; made anew whenever its sources change."""
import json
import os
import sys

HERE = json.loads({here!r})
here = os.path.dirname(os.path.abspath(__file__))
if HERE is not None:
    version, python, paths = HERE["version"], HERE["interpreter"], HERE["paths"]
else:
    version = "%d.%d" % sys.version_info[:2]
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    paths = [os.path.join(here, name) for name in ("site-" + version, {common!r})]
    if not os.path.isdir(paths[0]):
        sys.exit("spotwarp: the archive has no packages for Python " + version)

place = os.path.join(here, "python-" + version)
started = os.path.join(place, "bin", "python")
if not os.path.lexists(started):
    packages = os.path.join(place, "lib", "python" + version, "site-packages")
    os.makedirs(packages, exist_ok=True)
    os.makedirs(os.path.dirname(started), exist_ok=True)
    with open(os.path.join(packages, "spotwarp.pth"), "w") as file:
        file.write("".join(path + "\\n" for path in paths))
    with open(os.path.join(place, "pyvenv.cfg"), "w") as file:
        file.write("home = " + os.path.dirname(python) + "\\ninclude-system-site-packages = false\\n")
    # The link comes last: where it stands, the rest is whole.
    os.symlink(python, started + ".new")
    os.rename(started + ".new", started)
os.execv(started, [started, "-E", "-m", "provisioner.node"] + sys.argv[1:])
'''


def entry_text(here: Here | None = None) -> str:
    """Write node.py: for the packages beside it, or for those of *here*."""
    said = None
    if here is not None:
        said = {"interpreter": here.interpreter, "version": here.version, "paths": _existing(here.paths)}
    return _TEMPLATE.format(here=json.dumps(said), common=COMMON)


def _existing(paths: Sequence[str]) -> list[str]:
    assert all("\n" not in path for path in paths), "a .pth file has a path a line"
    return list(paths)
