"""Does a mounted workspace behave like a directory, also over a killed daemon and on a node that has only the store?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.calls import Call, Marker, Remount, Sync, Takeover
from tests.support.daemon import Fleet
from tests.support.mounts import needs_fuse
from tests.support.programs import programs
from tests.support.replay import replay
from tests.support.syscalls import observe

pytestmark = [*needs_fuse, pytest.mark.skipif(os.geteuid() != 0, reason="the programs change owners: needs root")]


@dataclass
class Cluster:
    """A fleet on which one program after the other runs, each in a fresh workspace root."""

    fleet: Fleet

    def __post_init__(self) -> None:
        self.node = self.fleet.node("--at", "latest").start()

    def on_marker(self, marker: Marker) -> Path:
        """Carry a marker out; whatever comes back must be what was there, to the nanosecond and the inode number."""
        if isinstance(marker, Sync):
            self.node.sync()
            return self.node.root
        before = observe(self.node.root)
        if isinstance(marker, Takeover):
            self.node.sync()
            self.node.kill()
            self.node.lose()
            self.node = self.fleet.node("--at", "latest").start("--takeover")
        else:
            assert isinstance(marker, Remount)
            self.node.kill()
            self.node.restart()
        after = observe(self.node.root)
        assert after == before, [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        return self.node.root


def run(directory: Path, program: list[Call]) -> None:
    cluster = Cluster(Fleet(directory, f"file://{directory / 'store'}"))
    try:
        replay(program, cluster.node.root, privileged=True, on_marker=cluster.on_marker)
    finally:
        cluster.fleet.close()


class TestPrograms:
    """Random programs of system calls against the reference, with remounts and takeovers among them."""

    @pytest.mark.promise("P-01")
    @pytest.mark.promise("P-11")
    def test_a_program_leaves_what_the_reference_says(self, tmp_path: Path) -> None:
        @seed(20)
        @settings(max_examples=2, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(programs(length_max=60, markers=True))
        def each(program: list[Call]) -> None:
            each.count += 1  # type: ignore[attr-defined]
            run(tmp_path / str(each.count), [*program, Remount(), Takeover()])  # type: ignore[attr-defined]

        each.count = 0  # type: ignore[attr-defined]
        each()

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("number", range(8))
    def test_many_programs(self, tmp_path: Path, number: int) -> None:
        @seed(1000 + number)
        @settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(programs(length_max=160, markers=True))
        def each(program: list[Call]) -> None:
            each.count += 1  # type: ignore[attr-defined]
            run(tmp_path / str(each.count), [*program, Remount(), Takeover()])  # type: ignore[attr-defined]

        each.count = 0  # type: ignore[attr-defined]
        each()
