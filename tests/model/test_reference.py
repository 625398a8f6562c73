"""Is the reference right? Every program gives the same outcome and the same tree on a plain directory of this disk.

Linux decides: where the two disagree, the reference is changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.calls import Call, settle
from tests.support.programs import programs
from tests.support.reference import Reference, Windows, diff
from tests.support.syscalls import observe, perform

PRIVILEGED = os.geteuid() == 0


@pytest.fixture(scope="module")
def plain_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    if path.stat().st_nlink != 2:
        pytest.skip(f"the filesystem of {path} does not count subdirectories in a directory's link count")
    try:
        os.setxattr(path, b"user.probe", b"")
    except OSError:
        pytest.skip(f"the filesystem of {path} has no user xattrs")
    return path


def replay(program: list[Call], root: Path) -> None:
    clock = Windows()
    root.chmod(0o755)
    reference = Reference(now_ns=root.stat().st_mtime_ns, uid=os.geteuid(), gid=os.getegid(), privileged=PRIVILEGED)
    clock.note(root.stat().st_mtime_ns, time.time_ns())
    for drawn in program:
        call = settle(drawn, reference)
        start_ns = time.time_ns()
        outcome = perform(root, call)
        clock.note(start_ns, time.time_ns())
        assert outcome == reference.apply(call, start_ns), call
        assert diff(reference.snapshot(), observe(root), clock) == [], call


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(privileged=PRIVILEGED))
def test_the_reference_is_what_linux_does(plain_directory: Path, program: list[Call]) -> None:
    root = Path(tempfile.mkdtemp(dir=plain_directory))
    try:
        replay(program, root)
        assert diff(observe(root), observe(root)) == []
    finally:
        shutil.rmtree(root)
