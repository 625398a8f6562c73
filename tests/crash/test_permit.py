"""Does a permit let exactly one of many prepared nodes go on, and does every manifest say which node it was?"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.core.manifests import Manifest
from tests.support.daemon import Node, await_true, manifests_of
from tests.support.mounts import needs_fuse
from tests.support.running import Run, Runs
from tests.support.running import runs as runs

FORMS = [pytest.param("fuse", marks=needs_fuse), "directory"]
WRITES = "echo here > found; cat kept 2>/dev/null; echo over"


def permit_of(node: Node) -> Path:
    return node.home / "permit"


def said(node: Node, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(permit_of(node).with_name(f"permit.{name}").read_text())
    return found


def candidate(runs: Runs, node: Node, ident: str, form: str, *command: str) -> Run:
    """Start a node that waits for its permit."""
    flags = ("--mode", form, "--permit", str(permit_of(node)), "--node-intent", ident, "--node-instance", f"i-{ident}")
    return runs.start(node, *(command or ("sh", "-c", WRITES)), flags=flags)


def prefetched(run: Run) -> Run:
    where = permit_of(run.node).with_name("permit.prefetched")
    await_true(lambda: where.exists() or run.process.poll() is not None, "the head to be loaded")
    assert where.exists(), run.story()
    return run


def permit(node: Node, epoch: int) -> None:
    draft = node.home / "permit.draft"
    draft.write_text(f"{epoch}\n")
    draft.replace(permit_of(node))


def nodes_named(manifests: list[Manifest]) -> list[Any]:
    return [found.notes.get("node") for found in manifests]


@pytest.mark.promise("P-06")
@pytest.mark.parametrize("form", FORMS)
def test_two_candidates_with_the_same_permit_and_a_living_writer_leave_one_winner(runs: Runs, form: str) -> None:
    # The writer is alive and keeps writing: the candidates follow it, and the permit is the decision to fence it.
    writer = runs.node()
    run = runs.start(
        writer, "sh", "-c", "echo old > kept; while :; do date +%N > now; sleep 0.2; done",
        flags=("--mode", form), cwd=writer.root,
    )  # fmt: skip
    await_true(lambda: len(manifests_of(writer.store)) >= 3 or run.process.poll() is not None, "three states")
    nodes = [runs.node(), runs.node()]
    candidates = [candidate(runs, node, f"0000000{at}-1", form) for at, node in enumerate(nodes)]
    for each in candidates:
        prefetched(each)
    before = manifests_of(writer.store)
    await_true(lambda: len(manifests_of(writer.store)) > len(before), "another state of the writer")
    assert {found.writer_epoch for found in manifests_of(writer.store)} == {1}, "nobody claims without a permit"

    for node in nodes:
        permit(node, 2)
    codes = sorted(each.ended() for each in candidates)
    assert codes == [ExitCode.OK, ExitCode.FENCED], [each.story() for each in candidates]
    assert run.ended() == ExitCode.FENCED, run.story()
    winner = next(each for each in candidates if each.process.returncode == 0)
    assert winner.output.split() == ["old", "over"]
    found = manifests_of(writer.store)
    assert len({made.session for made in found if made.writer_epoch == 2}) == 1
    assert [made.number for made in found if made.takeover] == [next(m.number for m in found if m.writer_epoch == 2)]
    at = candidates.index(winner)
    expected = {"intent": f"0000000{at}-1", "instance": f"i-0000000{at}-1"}
    assert nodes_named([made for made in found if made.writer_epoch > 1]) == [
        expected for made in found if made.writer_epoch > 1
    ]
    assert not any(nodes_named([made for made in found if made.writer_epoch == 1]))
    assert said(winner.node, "claimed")["writer_epoch"] == 2
    assert said(winner.node, "started")["form"] == form
    assert said(winner.node, "first_read")["at_s"] > 0
    loser = nodes[1 - at]
    assert not permit_of(loser).with_name("permit.claimed").exists()


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_new_workspace_is_made_by_permit_one_and_the_note_ends_with_its_session(runs: Runs, form: str) -> None:
    node, late, plain = runs.node(), runs.node(), runs.node()
    first, second = (prefetched(candidate(runs, each, ident, form)) for each, ident in ((node, "a-1"), (late, "b-1")))
    assert said(node, "prefetched")["manifest"] is None
    assert manifests_of(node.store) == []
    permit(node, 1)
    assert first.ended() == 0, first.story()
    made = manifests_of(node.store)
    assert made[0].writer_epoch == 1
    assert nodes_named(made) == [{"intent": "a-1", "instance": "i-a-1"}] * len(made)

    permit(late, 1)
    assert second.ended() == ExitCode.FENCED, second.story()
    assert manifests_of(node.store) == made, "a late permit does no harm"

    unnamed = runs.start(plain, "sh", "-c", WRITES, flags=("--mode", form), cwd=plain.root)
    assert unnamed.ended() == 0, unnamed.story()
    assert not any(nodes_named(manifests_of(node.store)[len(made) :]))


@pytest.mark.parametrize("form", FORMS[:1])
def test_restarts_on_the_same_node_need_no_other_permit(runs: Runs, form: str) -> None:
    node = runs.node()
    program = (
        "import os, pathlib, time\n"
        "lives = pathlib.Path('lives')\n"
        "lives.write_text((lives.read_text() if lives.exists() else '') + 'x')\n"
        "print('life', len(lives.read_text()), flush=True)\n"
        "while len(lives.read_text()) < 3: time.sleep(0.1)\n"
    )
    script = node.home / "lives.py"
    script.write_text(program)
    run = prefetched(candidate(runs, node, "a-1", form, sys.executable, str(script)))
    permit(node, 1)
    run.until("life 1")
    node.call("sync")
    os.kill(node.pid, signal.SIGKILL)  # the supervisor brings the daemon back, and `run` starts the command again
    run.until("life 2")
    node.call("sync")
    run.lose()
    again = candidate(runs, node, "a-1", form, sys.executable, str(script))
    assert again.ended() == 0, again.story()
    assert "life 3" in again.output
    found = manifests_of(node.store)
    assert found[-1].writer_epoch > 2
    assert nodes_named(found) == [{"intent": "a-1", "instance": "i-a-1"}] * len(found)


def test_what_is_no_permit_is_refused_and_a_signal_ends_the_wait(runs: Runs) -> None:
    wrong, patient = runs.node(), runs.node()
    run = prefetched(candidate(runs, wrong, "a-1", "directory"))
    permit_of(wrong).write_text("soon")
    assert run.ended() == ExitCode.CONFIG
    assert "'soon', which is no writer epoch" in run.said

    waiting = prefetched(candidate(runs, patient, "b-1", "directory"))
    waiting.send(signal.SIGTERM)
    assert waiting.ended() == 128 + signal.SIGTERM, waiting.story()
    assert manifests_of(patient.store) == []
