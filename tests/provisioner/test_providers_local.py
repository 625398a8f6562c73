"""Does a local node end with everything in it, outlive its controller, and keep the controller's secrets out?"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from provisioner.core.gpus import parse_gpu
from provisioner.core.offers import Market, with_bid
from provisioner.core.ports import Created, CreateRefused, InstanceStatus, Launch, RefusedWhy
from provisioner.core.wishes import Wish
from provisioner.providers.local import Local, LocalMachine
from provisioner.providers.processes import marked, mounts_under
from tests.support.providers import SystemClock, SystemEntropy
from tests.support.simulated import until

WISH = Wish(parse_gpu("CPU"))
PATIENCE_S = 30.0


def local(base: Path, **machine: object) -> Local:
    settings = LocalMachine(**machine)  # type: ignore[arg-type]
    return Local(base, clock=SystemClock(), entropy=SystemEntropy(), machine=settings)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Local]:
    made = local(tmp_path / "nodes", slots=2)
    yield made
    with trio.CancelScope(shield=True):
        for instance in await made.list_instances():
            await made.destroy(instance.instance_id)


async def started(provider: Local, script: str, **changes: Any) -> str:
    (offer, *_) = await provider.search(WISH)
    launch = Launch("sw-job-00c0ffee-1", with_bid(offer), "", 1.0, script, {"TOKEN": "s3cret"}, bid_usd_h=0.001)
    outcome = await provider.create(replace(launch, **changes))
    assert isinstance(outcome, Created), outcome
    return outcome.instance_id


async def until_status(provider: Local, instance_id: str, status: InstanceStatus) -> str:
    words: list[str] = []

    async def there() -> bool:
        row = await provider.show(instance_id)
        if row is not None and row.status is status:
            words.append(row.status_text)
        return bool(words)

    await until(there, every_s=0.05, at_most_s=PATIENCE_S)
    return words[0]


async def until_there(path: Path) -> None:
    async def there() -> bool:
        return path.exists()

    await until(there, every_s=0.05, at_most_s=PATIENCE_S)


@pytest.mark.promise("P-15")
async def test_a_node_gets_its_own_environment_and_nothing_of_the_controllers(
    provider: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "key-of-the-account")
    instance_id = await started(provider, "env >env.txt; echo noise; touch done; sleep 600")
    home = tmp_path / "nodes" / instance_id
    await until_there(home / "disk" / "done")
    text = (home / "disk" / "env.txt").read_text()
    assert "TOKEN=s3cret" in text
    assert f"HOME={home / 'disk'}" in text
    assert "key-of-the-account" not in text
    assert "s3cret" not in (home / "record.json").read_text()
    assert (home / "node.log").read_text() == "noise\n"
    assert home.stat().st_mode & 0o077 == 0, "what a node writes may be secret"
    assert all(b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked()[str(home)])


async def test_destroy_takes_what_left_the_process_group_too(provider: Local, tmp_path: Path) -> None:
    script = "setsid sh -c 'touch away; sleep 600' & (sleep 600 &) ; touch here; sleep 600"
    instance_id = await started(provider, script)
    disk = tmp_path / "nodes" / instance_id / "disk"
    await until_there(disk / "away")
    await until_there(disk / "here")
    assert len(marked()[str(disk.parent)]) >= 4
    leader = int((disk.parent / "pid").read_text())
    await provider.destroy(instance_id)
    assert str(disk.parent) not in marked()
    assert not disk.parent.exists()
    assert not Path(f"/proc/{leader}").exists(), "no zombie either"


async def test_the_first_process_is_the_rental(provider: Local, tmp_path: Path) -> None:
    instance_id = await started(provider, "setsid sleep 600 & sleep 0.2; exit 7")
    assert await until_status(provider, instance_id, InstanceStatus.FAILED) == "exited with 7"
    assert str(tmp_path / "nodes" / instance_id) not in marked(), "what it left behind was ended"
    assert (tmp_path / "nodes" / instance_id / "disk").exists(), "for salvage, until it is destroyed"


async def test_an_end_between_two_looks_is_no_kill(
    provider: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance_id = await started(provider, "sleep 600")
    home = tmp_path / "nodes" / instance_id
    await until_there(home / "pid")

    def ended_meanwhile() -> dict[str, set[int]]:
        (home / "exit").write_text("7")
        return {}

    with monkeypatch.context() as patched:
        patched.setattr("provisioner.providers.local.marked", ended_meanwhile)
        shown = await provider.show(instance_id)
    assert shown is not None
    assert (shown.status, shown.status_text) == (InstanceStatus.FAILED, "exited with 7")


async def test_a_killed_node_is_seen(provider: Local, tmp_path: Path) -> None:
    instance_id = await started(provider, "sleep 600")
    await until_status(provider, instance_id, InstanceStatus.RUNNING)
    os.killpg(int((tmp_path / "nodes" / instance_id / "pid").read_text()), signal.SIGKILL)
    assert await until_status(provider, instance_id, InstanceStatus.FAILED) == "killed"


async def test_a_node_may_end_itself_as_its_dead_man_does(provider: Local) -> None:
    instance_id = await started(provider, "(sleep 0.2; kill -KILL 0) & sleep 600")
    await until_status(provider, instance_id, InstanceStatus.FAILED)


async def test_a_node_ends_at_its_time_without_any_controller(provider: Local, tmp_path: Path) -> None:
    instance_id = await started(provider, "sleep 600", ends_at_s=SystemClock().now_s() + 1)
    home = str(tmp_path / "nodes" / instance_id)

    async def ended() -> bool:
        return home not in marked()

    await until(ended, every_s=0.1, at_most_s=PATIENCE_S)


async def test_another_controller_finds_the_nodes(provider: Local, tmp_path: Path) -> None:
    instance_id = await started(provider, "sleep 600")
    await until_status(provider, instance_id, InstanceStatus.RUNNING)
    await provider.aclose()
    successor = local(tmp_path / "nodes")
    (row,) = await successor.list_instances()
    assert (row.instance_id, row.label, row.status, row.market) == (
        instance_id, "sw-job-00c0ffee-1", InstanceStatus.RUNNING, Market.SPOT,
    )  # fmt: skip
    await successor.destroy(instance_id)
    assert await successor.list_instances() == []
    assert await provider.list_instances() == []


MOUNTS = """
import pyfuse3, sys, trio
pyfuse3.init(pyfuse3.Operations(), sys.argv[1], {"fsname=node"})
trio.run(pyfuse3.main)
"""


@pytest.mark.fuse
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="/dev/fuse is missing or not ours")
async def test_what_a_dead_node_left_mounted_is_detached_and_not_deleted_through(
    provider: Local, tmp_path: Path
) -> None:
    pytest.importorskip("pyfuse3", reason="the fuse extra is not installed")
    command = shlex.join([sys.executable, "-c", MOUNTS, "workspace"])
    instance_id = await started(provider, f"mkdir workspace; setsid {command} & sleep 600")
    home = tmp_path / "nodes" / instance_id

    async def mounted() -> bool:
        return mounts_under(home) == [home / "disk" / "workspace"]

    await until(mounted, every_s=0.05, at_most_s=PATIENCE_S)
    await provider.destroy(instance_id)
    assert mounts_under(home) == []
    assert not home.exists()


async def test_a_disk_that_a_dead_mount_left_closed_is_deleted(provider: Local, tmp_path: Path) -> None:
    closed = (
        "mkdir -p a/b/c && touch a/b/c/file && chmod 0 a/b && ln -s /etc a/link && { chattr +i a || :; }; touch done"
    )
    node = await started(provider, f"{closed}; sleep 1000")
    disk = tmp_path / "nodes" / node / "disk"
    await until_there(disk / "done")
    await provider.destroy(node)
    assert not disk.exists()
    assert await provider.show(node) is None
    assert Path("/etc/passwd").exists()


async def test_the_first_nodes_boot_as_they_are_told_to(tmp_path: Path) -> None:
    provider = local(tmp_path / "nodes", slots=4, boots=("echo slow >told", "exit 3"))
    nodes = [await started(provider, "echo ran >>told; sleep 1000") for _ in range(3)]
    told = [tmp_path / "nodes" / node / "disk" / "told" for node in nodes]
    await until_status(provider, nodes[1], InstanceStatus.FAILED)

    async def ran() -> bool:
        return all(told[number].exists() and "ran" in told[number].read_text() for number in (0, 2))

    await until(ran, every_s=0.05, at_most_s=PATIENCE_S)
    assert told[0].read_text() == "slow\nran\n"
    assert told[2].read_text() == "ran\n"
    for node in nodes:
        await provider.destroy(node)


async def test_a_destroyed_node_does_not_start_late(provider: Local, tmp_path: Path) -> None:
    instance_id = await started(provider, "touch ran; sleep 600")
    await provider.destroy(instance_id)
    await trio.sleep(0.3)
    assert not (tmp_path / "nodes" / instance_id).exists()
    assert str(tmp_path / "nodes" / instance_id) not in marked()


async def test_a_record_whose_controller_died_before_the_start_can_be_destroyed(
    provider: Local, tmp_path: Path
) -> None:
    home = tmp_path / "nodes" / "0123456789ab"
    home.mkdir(parents=True)
    (home / "record.json").write_text('{"label": "sw-job-00c0ffee-9", "market": "spot", "created_at_s": 1.0}')
    (row,) = await provider.list_instances()
    assert (row.status, row.status_text) == (InstanceStatus.FAILED, "never started")
    await provider.destroy(row.instance_id)
    assert await provider.list_instances() == []


async def test_slots_are_a_limit(provider: Local) -> None:
    for _ in range(2):
        await started(provider, "sleep 600")
    assert await provider.search(WISH) == []
    offer = (await local(Path("/nonexistent/nodes")).search(WISH))[0]
    outcome = await provider.create(Launch("sw-job-00c0ffee-3", offer, "", 1.0, "sleep 600", bid_usd_h=0.1))
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.NO_CAPACITY


@pytest.mark.parametrize("instance_id", ["..", "../nodes", "", "/", "0123456789AB", "0123456789ab/.."])
async def test_an_id_names_nothing_but_a_node(provider: Local, tmp_path: Path, instance_id: str) -> None:
    kept = tmp_path / "nodes" / "0123456789AB"
    kept.mkdir(parents=True)
    await provider.destroy(instance_id)
    assert kept.exists()
    assert await provider.show(instance_id) is None


async def test_a_directory_that_cannot_be_made_is_no_capacity(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    provider = local(tmp_path / "file")
    (offer,) = await provider.search(WISH)
    outcome = await provider.create(Launch("sw-job-00c0ffee-1", offer, "", 1.0, "true", bid_usd_h=0.1))
    assert isinstance(outcome, CreateRefused)
    assert os.listdir(tmp_path) == ["file"]
