"""Does a rented node do what its controller orders, from its first report to its last, with real processes?"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from provisioner.core.bootstrap import EXIT_FENCED
from provisioner.core.jobs import Limits
from provisioner.core.rendezvous import NodePhase
from provisioner.providers.processes import marked
from tests.support.daemon import manifests_of
from tests.support.mounts import needs_fuse
from tests.support.rented import Controlling, Rented, controlling

FORMS = [pytest.param("fuse", marks=needs_fuse), "directory"]

# A trainer that saves often, resumes from its newest checkpoint, and ends when it is asked to.
TRAINER = """
import os, pathlib, sys, time
steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
place = pathlib.Path(os.environ["SPOTWARP_CHECKPOINT_DIR"])
done = sorted(place.glob("*.pt"))
step = int(done[-1].stem) if done else 0
print("resumed at", step, flush=True)
print("told", os.environ.get("MY_TOKEN"), os.environ.get("PYTHONPATH"), os.environ.get("SPOTWARP_INTENT"), flush=True)
while step < steps:
    step += 1
    time.sleep(0.05 if done else pause_s)
    draft = place / "draft"
    draft.write_bytes(b"%d " % step * 50000)
    draft.rename(place / f"{step:06}.pt")
    print("step", step, flush=True)
print("finished", flush=True)
"""


def trainer(tmp_path: Path, steps: int, pause_s: float) -> tuple[str, ...]:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    return (sys.executable, "-u", str(script), str(steps), str(pause_s))


def published(world: Controlling) -> list[str]:
    return [str(made.notes.get("node", {}).get("intent")) for made in manifests_of(world.store.url)]


@pytest.mark.promise("P-15")
@pytest.mark.parametrize("form", FORMS)
async def test_from_the_first_report_to_the_last(tmp_path: Path, form: str) -> None:
    async with controlling(tmp_path, trainer(tmp_path, 3, 0.3), form=form) as world:
        node = await world.rent(MY_TOKEN="a-job-secret", PYTHONPATH="/image/own")
        ready = await node.until(NodePhase.READY, NodePhase.UNFIT)
        assert ready.phase is NodePhase.READY, ready
        assert ready.instance_id == node.instance_id
        assert float(ready.checks["store_up_mbps"]) > 0
        assert ready.checks["gpu"] == "not wanted"
        assert await world.epoch() == 0, "nobody claims without a permit"

        await world.permit(node)
        running = await node.until(NodePhase.RUNNING, NodePhase.ENDED)
        assert running.writer_epoch == 1
        ended = await node.until(NodePhase.ENDED)
        assert (ended.exit_code, ended.why) == (0, ""), node.story()
        assert await node.until_exit() == 0
        times = ended.times
        order = ["booted", "ready", "permitted", "claimed", "started", "ended"]
        assert sorted(order, key=lambda name: times[name]) == order
        if form == "directory":
            assert times["claimed"] <= times["first_read"] <= times["started"]
        assert ended.checks["form"] == form
        log = await node.log()
        assert "resumed at 0" in log
        assert "told [secret] /image/own None" in log, "the command has its variables, and what is uploaded no secret"
        assert "a-job-secret" not in repr(ended)
        assert "finished" in log
        head = await world.view.head()
        assert head is not None
        assert (head.intent, head.instance_id, head.quiescent) == (node.ident, node.instance_id, True)
        assert set(published(world)) == {node.ident}


@pytest.mark.parametrize("form", FORMS)
async def test_hand_over_loses_nothing_and_the_next_node_goes_on(tmp_path: Path, form: str) -> None:
    async with controlling(tmp_path, trainer(tmp_path, 30, 2.0), form=form) as world:
        old = await world.rent()
        await world.permit(old)
        await old.until(NodePhase.RUNNING)
        new = await world.rent()
        await new.until(NodePhase.READY)
        assert await world.epoch() == 1, "it waits beside the running one"
        await old.order(hand_over=True)
        handed = await old.until(NodePhase.ENDED)
        assert (handed.exit_code, handed.why) == (None, "handed over"), old.story()
        made = max(int(line.split()[1]) for line in (await old.log()).splitlines() if line.startswith("step "))

        await world.permit(new)
        done = await new.until(NodePhase.ENDED, NodePhase.UNFIT, NodePhase.LOST)
        assert (done.phase, done.exit_code) == (NodePhase.ENDED, 0), new.story()
        resumed = next(line for line in (await new.log()).splitlines() if line.startswith("resumed at"))
        assert int(resumed.split()[2]) >= made - 1, "at most the step that was being made is made again"
        assert done.resumed_from is not None
        assert published(world) == sorted(published(world)), "no state of the old node after the new one's first"


async def test_an_end_order_ends_a_candidate_and_a_running_node(tmp_path: Path) -> None:
    async with controlling(tmp_path, ("sh", "-c", "echo kept > kept; sleep 600")) as world:
        candidate, node = await world.rent(), await world.rent()
        await world.permit(node)
        await node.until(NodePhase.RUNNING)
        await candidate.until(NodePhase.READY)
        for each in (candidate, node):
            await each.order(end=True)
            ended = await each.until(NodePhase.ENDED)
            assert ended.exit_code is None
            assert await each.until_exit() == EXIT_FENCED, "the code by which the script destroys its rental"
        head = await world.view.head()
        assert head is not None
        assert head.files >= 1, "what the command had written is published"
        assert all(str(each.disk.parent) not in marked() for each in (candidate, node))


async def test_a_loser_says_so_and_the_winner_is_undisturbed(tmp_path: Path) -> None:
    async with controlling(tmp_path, trainer(tmp_path, 4, 0.5)) as world:
        nodes = [await world.rent(), await world.rent()]
        for node in nodes:
            await node.until(NodePhase.READY)
        for node in nodes:
            await node.order(permit_writer_epoch=1)
        codes = sorted([await node.until_exit() for node in nodes])
        assert codes == [0, EXIT_FENCED], [node.story() for node in nodes]
        phases = {(await node.until(NodePhase.ENDED, NodePhase.LOST)).phase for node in nodes}
        assert phases == {NodePhase.ENDED, NodePhase.LOST}
        assert len(set(published(world))) == 1


async def test_an_unfit_machine_is_told_with_what_was_measured(tmp_path: Path) -> None:
    async with controlling(tmp_path, ("true",)) as world:
        await world.set(store_floor_mbps=1e9)
        slow = await world.rent()
        report = await slow.until(NodePhase.UNFIT, NodePhase.READY)
        assert report.phase is NodePhase.UNFIT
        assert "Mbit/s, wanted are 1e+09" in report.why
        assert float(report.checks["store_down_mbps"]) > 0
        assert await slow.until_exit() == 1

        await world.set(store_floor_mbps=0.01, command=("no-such-program-here",))
        lacking = await world.rent()
        report = await lacking.until(NodePhase.UNFIT)
        assert report.exit_code == 127
        assert "no-such-program-here" in report.why
        assert await world.epoch() == 0


async def test_a_crash_is_tried_again_here_and_given_up_after_so_many(tmp_path: Path) -> None:
    fails = 'echo life >> lives; test "$(wc -l < lives)" -ge 3 && exit 0; exit 3'
    async with controlling(tmp_path, ("sh", "-c", fails)) as world:
        await world.set(limits=Limits(crashes_max=2))
        node = await world.rent()
        await world.permit(node)
        ended = await node.until(NodePhase.ENDED)
        assert ended.exit_code == 0, node.story()
        assert await world.epoch() >= 3, "it went on, on its own head, without another permit"

        await world.set(command=("sh", "-c", "exit 3"), limits=Limits(crashes_max=1))
        hopeless = await world.rent()
        await world.permit(hopeless)
        ended = await hopeless.until(NodePhase.ENDED)
        assert ended.exit_code == 3
        assert ended.why.startswith("the command failed 2 times in a row")
        assert await hopeless.until_exit() == 3


async def test_a_notice_of_the_provider_is_passed_on(tmp_path: Path) -> None:
    saves = "trap 'echo saved > saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    async with controlling(tmp_path, ("sh", "-c", saves)) as world:
        node = await world.rent()
        await world.permit(node)
        await node.until(NodePhase.RUNNING)
        await node.until_true(lambda: "up" in node.story(), "start of the command")
        send_to_agent(node, signal.SIGTERM)
        ended = await node.until(NodePhase.ENDED)
        assert ended.exit_code is None, "it was told to end: the job is not over"
        assert ended.notice_ends_at_s is not None
        assert (await world.store.head("work")).files >= 1  # type: ignore[union-attr]


def send_to_agent(node: Rented, number: int) -> None:
    """As a container's runtime does it: the first process gets the signal; the script passes it on."""
    for pid in marked()[str(node.disk.parent)]:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"provisioner.node" in words:
            os.kill(pid, number)
            return
    raise AssertionError("no agent lives")


@pytest.mark.promise("P-06")
@pytest.mark.parametrize("form", FORMS)
async def test_a_resumed_zombie_finds_itself_fenced_saves_what_it_had_and_ends(tmp_path: Path, form: str) -> None:
    writes = "echo published > published; sleep 4; echo only-here > only-here; echo written; sleep 600"
    slow = {"SPOTWARP_INTERVALS": "{only-here: 1h}"}
    async with controlling(tmp_path, ("sh", "-c", writes), slow, form=form) as world:
        old = await world.rent()
        await world.permit(old)
        await old.until(NodePhase.RUNNING)
        await old.until_true(lambda: "written" in old.story(), "the unpublished file")
        for pid in marked()[str(old.disk.parent)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lost = manifests_of(world.store.url)[-1]

        await world.set(command=("sh", "-c", "cat published; test ! -e only-here"))
        new = await world.rent()
        await world.permit(new)
        assert (await new.until(NodePhase.ENDED)).exit_code == 0, new.story()
        before = manifests_of(world.store.url)

        again = world.resume(old)
        report = await old.until(NodePhase.LOST, NodePhase.ENDED)
        assert report.phase is NodePhase.LOST, old.story()
        assert await trio.to_thread.run_sync(again.wait) != 0
        assert f"run ended with {EXIT_FENCED}" in old.story()
        assert manifests_of(world.store.url) == before, "nothing of it is in the workspace"
        assert before[-1].writer_epoch > lost.writer_epoch
        if form == "fuse":
            salvage = [path for path in (tmp_path / "store").rglob("salvage/**/*") if path.is_file()]
            assert salvage, old.story()
            assert "is kept in the store, as salvage" in report.why
