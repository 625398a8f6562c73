"""Does a trial mount tell whether FUSE works here, whatever /dev/fuse looks like, and leave nothing?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.fuse.mountinfo import parse
from spotwarp_fs.fuse.trying import try_mount
from tests.support.mounts import needs_fuse


@needs_fuse[0]
@needs_fuse[1]
def test_where_fuse_works_it_is_tried_and_nothing_stays() -> None:
    try_mount()
    with open("/proc/self/mountinfo") as table:
        assert not [entry for entry in parse(table.read()) if "trial" in entry.source]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a mount namespace needs root")
def test_a_device_that_is_there_and_does_not_work_is_found_out() -> None:
    program = (
        "from spotwarp_fs.core.errors import UserError\n"
        "from spotwarp_fs.fuse.trying import try_mount\n"
        "try:\n    try_mount()\nexcept UserError as error:\n    print(error)\n    raise SystemExit(error.exit_code)\n"
    )
    script = 'mount --bind /dev/null /dev/fuse && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.NO_FUSE, done.stderr
    assert "trial mount was refused" in done.stdout
