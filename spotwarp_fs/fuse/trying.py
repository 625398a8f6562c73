"""Try whether a FUSE mount works here, by mounting an empty filesystem on a directory of its own.

Invariant: nothing stays mounted, no thread or descriptor of FUSE stays in this process, and the answer takes
`DEADLINE_S` at most. Some containers show /dev/fuse and all rights, and refuse the mount itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Final

from spotwarp_fs.fuse import mounting
from spotwarp_fs.fuse.mountinfo import mounts_at

DEADLINE_S: Final = 20.0
_TRIAL: Final = (
    "import sys, pyfuse3\n"
    "pyfuse3.init(pyfuse3.Operations(), sys.argv[1], {'fsname=spotwarp-trial'})\n"
    "pyfuse3.close(unmount=True)\n"
)


def try_mount() -> None:
    """Raise NoFuse with the cause if a mount does not work on this node."""
    mounting.check_fuse()
    directory = os.path.realpath(tempfile.mkdtemp(prefix="spotwarp-trial-"))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, directory], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise mounting.NoFuse(f"a trial mount did not end within {DEADLINE_S:.0f} s") from None
    finally:
        if mounts_at(directory):
            with suppress(OSError):
                mounting.unmount(directory, lazy=True)
        with suppress(OSError):
            os.rmdir(directory)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise mounting.NoFuse(f"a trial mount was refused: {said}")
