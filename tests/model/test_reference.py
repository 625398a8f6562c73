"""Is the reference right? Every program gives the same outcome and the same tree on a plain directory of this disk.

Linux decides: where the two disagree, the reference is changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.calls import Call
from tests.support.programs import programs
from tests.support.reference import diff
from tests.support.replay import replay
from tests.support.syscalls import observe

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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(privileged=PRIVILEGED))
def test_the_reference_is_what_linux_does(plain_directory: Path, program: list[Call]) -> None:
    root = Path(tempfile.mkdtemp(dir=plain_directory))
    try:
        replay(program, root, privileged=PRIVILEGED)
        assert diff(observe(root), observe(root)) == []
    finally:
        shutil.rmtree(root)
