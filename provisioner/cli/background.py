"""Start a controller in the background: a process of its own session, with its log in the state directory.

Invariant: nothing secret is in its arguments; the job's spec lies in the store, keys come by the environment and files.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from provisioner.cli.edge import Stopped
from provisioner.cli.jobs_here import JobsHere, lives

STARTS_S: Final = 30.0
LOOK_S: Final = 0.1
TAIL_BYTES: Final = 2000


def start(job: str, store: str, here: JobsHere, files: dict[str, str | None], *, adopt: bool) -> int:
    """Start it and return its process id, once it has noted that it controls the job; raises Stopped when it ends."""
    options = [word for name, value in files.items() if value for word in (name, str(Path(value).absolute()))]
    options += ["--adopt"] if adopt else []
    command = [
        sys.executable,
        "-m",
        "spotwarp_fs",
        "failover",
        "--job",
        job,
        "--store",
        store,
        "--controller",
        *options,
    ]
    log = here.log(job)
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("ab") as output:
        log.chmod(0o600)
        began = output.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline_s = time.monotonic() + STARTS_S
    while time.monotonic() < deadline_s:
        record = here.read(job)
        if record is not None and record.pid == child.pid and lives(record):
            child.returncode = 0  # it lives on: the interpreter need not warn of it
            return child.pid
        if child.poll() is not None:
            said = log.read_bytes()[began:][-TAIL_BYTES:].decode(errors="replace").strip()
            raise Stopped(f"the controller of job {job} ended at once with {child.returncode}: {said or log}")
        # Nothing else runs in this process: it only waits for the one that it has started.
        time.sleep(LOOK_S)  # noqa: TID251
    raise Stopped(f"the controller of job {job} (process {child.pid}) has not begun in {STARTS_S:.0f} s; see {log}")
