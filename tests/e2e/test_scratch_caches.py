"""Does an environment that a package manager links out of its cache reach the next node, and the cache not (B11)?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.daemon import Fleet
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = needs_fuse
MODULES = 40


def install(root: Path) -> None:
    """What `uv pip install --link-mode hardlink` does: fill the cache, then link out of it."""
    archive = root / ".cache" / "uv" / "archive-v0" / "x1" / "tinypkg"
    archive.mkdir(parents=True)
    target = root / "venv" / "lib" / "tinypkg"
    target.mkdir(parents=True)
    for number in range(MODULES):
        staged = archive / f".tmp{number}"
        staged.write_bytes(b"X = %d\n" % number * 20_000)
        staged.rename(archive / f"m{number}.py")
        os.link(archive / f"m{number}.py", target / f"m{number}.py")


@pytest.mark.history("C18")
def test_a_linked_environment_is_published_and_its_cache_is_not(fleet: Fleet) -> None:
    first = fleet.node().start()
    install(first.root)
    wheels = first.root / ".cache" / "uv" / "wheels"
    wheels.mkdir()
    (wheels / "big.whl").write_bytes(os.urandom(3 << 20))
    (wheels / "big.whl").rename(first.root / "big.whl")
    os.rename(first.root / "venv" / "lib" / "tinypkg" / "m1.py", wheels / "m1.py")
    assert os.stat(first.root / "venv" / "lib" / "tinypkg" / "m5.py").st_nlink == 2
    with (wheels / "synced").open("wb") as file:
        file.write(b"local")
        os.fsync(file.fileno())
    expected = (first.root / "big.whl").read_bytes()
    first.sync()
    first.kill()
    first.close()
    assert first.restart().report["notes"] == []
    assert (first.root / ".cache" / "uv" / "wheels" / "synced").read_bytes() == b"local"
    first.lose()

    second = fleet.node().start("--takeover")
    assert "scratch, not restored: .cache/uv" in second.report["notes"]
    assert (second.root / "big.whl").read_bytes() == expected
    assert os.listdir(second.root / ".cache") == []
    assert os.stat(second.root / ".cache").st_nlink == 2
    installed = second.root / "venv" / "lib" / "tinypkg"
    assert sorted(os.listdir(installed)) == sorted(f"m{n}.py" for n in range(MODULES) if n != 1)
    for number in (0, 5, MODULES - 1):
        module = installed / f"m{number}.py"
        assert module.read_bytes() == b"X = %d\n" % number * 20_000
        assert module.stat().st_nlink == 1
