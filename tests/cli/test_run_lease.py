"""Does `spotwarp run` wait for another writer, and only as long as it should?"""

from __future__ import annotations

import signal

from spotwarp_fs.core.errors import ExitCode
from tests.support.mounts import needs_fuse
from tests.support.running import Runs
from tests.support.running import runs as runs

pytestmark = needs_fuse


def test_a_live_writer_is_waited_for_until_it_leaves(runs: Runs) -> None:
    other, node = runs.node().start(), runs.node()
    (other.root / "f").write_text("from the other node")
    refused = runs.start(node, "true", flags=("--no-wait",))
    assert refused.ended() == ExitCode.LIVE_WRITER, refused.story()

    run = runs.start(node, "sh", "-c", 'cat "$SPOTWARP_WORKSPACE/f"').until("taking over in")
    assert other.umount() == 0
    assert run.ended() == 0, run.story()
    assert run.output == "from the other node"


def test_waiting_can_be_ended(runs: Runs) -> None:
    runs.node().start()
    node = runs.node()
    run = runs.start(node, "true").until("taking over in")
    run.send(signal.SIGTERM)
    assert run.ended() == 128 + signal.SIGTERM, run.story()
    assert not node.root.is_mount()


def test_takeover_does_not_wait(runs: Runs) -> None:
    other, node = runs.node().start(), runs.node()
    (other.root / "f").write_text("1")
    other.sync()
    run = runs.start(node, "sh", "-c", 'cat "$SPOTWARP_WORKSPACE/f"', flags=("--takeover",))
    assert run.ended() == 0, run.story()
    assert run.output == "1"
    assert "taking over in" not in run.said
