"""Tell the main job as a story: train on node A, lose A in mid-save, resume on node B, compare with an undisturbed run.

Only the spotwarp command touches the workspace, as in a user's shell. Invariant: whatever happens, nothing outlives the
demo: no process, no mount, and (without --keep) no file.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import demo_corpus
from demo_node import DemoFailed, Node, end
from demo_report import Report
from demo_trainer import TrainerProcess
from rich.console import Console
from seaweed import Seaweed, seaweed

STEPS, SAVE_EVERY, KILL_STEP = 300, 50, 200
BUCKET = "demo"
DEMO_S_MAX = 240
WATCH_S = 1.5


class Demo:
    """The places, the bucket and the report that the acts share."""

    def __init__(self, base: Path, report: Report, server: Seaweed) -> None:
        self.base = base
        self.report = report
        self.server = server
        self.workspace = base / "workspace"
        server.create_bucket(BUCKET)

    def node(self, name: str) -> Node:
        disk, store = self.base / f"disk-{name}", self.server.url(BUCKET, "runs")
        return Node(name, disk, self.workspace, store, self.server.environment)

    def run_undisturbed(self) -> str:
        """Train from start to end in a plain directory and return the final weights' digest."""
        directory = self.base / "undisturbed"
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "corpus.txt").write_bytes(demo_corpus.gather())
        trainer = TrainerProcess(directory, steps=STEPS, save_every=SAVE_EVERY)
        try:
            return trainer.finish()
        finally:
            trainer.kill()

    def bytes_stored(self) -> int:
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))


@contextlib.contextmanager
def publishes_noted(node: Node, report: Report) -> Iterator[threading.Event]:
    """Ask `spotwarp status` now and then and note each new manifest, until the yielded event is set."""
    stopped = threading.Event()

    def watch() -> None:
        head = None
        while not stopped.wait(WATCH_S):
            try:
                status = node.status()
            except (DemoFailed, OSError, ValueError, IndexError):  # the node has just been killed
                return
            if status["head_number"] != head:
                head = status["head_number"]
                safe = status["newest_safe_checkpoint"]
                report.mark(
                    "publish", f"manifest {head}, safe in the store: {safe['name'] if safe else 'no checkpoint'}"
                )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield stopped
    finally:
        stopped.set()
        watcher.join(10)


def train_until_lost(demo: Demo, node: Node) -> tuple[TrainerProcess, float]:
    """Mount on an empty workspace, train, and lose everything while a checkpoint is half written."""
    report = demo.report
    report.mark("mount", node.mount(takeover=False))
    (demo.workspace / "data").mkdir()
    (demo.workspace / "data" / "corpus.txt").write_bytes(demo_corpus.gather())
    trainer = TrainerProcess(demo.workspace, steps=STEPS, save_every=SAVE_EVERY)
    try:
        with publishes_noted(node, report) as watch_ended:
            report.mark("write", "the trainer took its first step", trainer.wait_for("step", 1).at_s)
            # No status command may be running when the node dies: it would write into the home that is being lost.
            trainer.wait_for("step", KILL_STEP - SAVE_EVERY // 2)
            watch_ended.set()
            trainer.wait_for("saving", KILL_STEP)
            half_written = demo.workspace / f"checkpoint-{KILL_STEP}" / "model.npz"
            while not (half_written.exists() and half_written.stat().st_size):
                time.sleep(0.001)
            killed_s = node.die(trainer.process.pid)
    finally:
        trainer.kill()
    report.mark("kill", f"SIGKILL while checkpoint-{KILL_STEP} was being written; node A's disk is gone", killed_s)
    report.figures.kill_step = KILL_STEP
    report.figures.killed_in_mid_save = report.check(
        f"checkpoint-{KILL_STEP} was complete before the kill", holds=not trainer.has_said("saved", KILL_STEP)
    )
    return trainer, killed_s


def newest_checkpoint(workspace: Path) -> Path:
    found = sorted(workspace.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        raise DemoFailed(f"node B found no checkpoint at all: {sorted(os.listdir(workspace))}")
    return found[-1]


def check_log(demo: Demo) -> None:
    """Require of the log's published part that it is a prefix of what an undisturbed run writes: no zeros, no gap."""
    expected = (demo.base / "undisturbed" / "train.log").read_bytes()
    found = (demo.workspace / "train.log").read_bytes()
    holds = bool(found) and expected.startswith(found)
    demo.report.figures.log_is_prefix = demo.report.check(
        "train.log on node B is not a prefix of the undisturbed log", holds=holds
    )


def resume(demo: Demo, node: Node, lost: TrainerProcess, killed_s: float) -> str:
    """Mount on an empty cache, read, go on training to the end; return the final weights' digest."""
    report, figures = demo.report, demo.report.figures
    began_s = time.monotonic()
    told = node.mount(takeover=True)
    figures.mount_s = round(time.monotonic() - began_s, 3)
    report.mark("mount", told)
    began_s = time.monotonic()
    newest = newest_checkpoint(demo.workspace)
    with (newest / "model.npz").open("rb") as model:
        model.read(1)
    figures.first_read_s = round(time.monotonic() - began_s, 3)
    report.mark("first byte", f"read from {newest.name}/model.npz")
    check_log(demo)

    trainer = TrainerProcess(demo.workspace, steps=STEPS, save_every=SAVE_EVERY)
    try:
        resumed = trainer.wait_for("resumed")
        step = trainer.wait_for("step")
        report.mark("resumed", f"from checkpoint-{resumed.step}; step {step.step} is done", step.at_s)
        figures.resumed_step = resumed.step
        figures.steps_lost = KILL_STEP - resumed.step
        figures.seconds_lost = round(killed_s - lost.wait_for("step", resumed.step).at_s, 3)
        figures.rto_s = round(step.at_s - killed_s, 3)
        digest = trainer.finish()
    finally:
        trainer.kill()
    report.mark("finished", f"step {STEPS}")
    return digest


def final_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the last checkpoint."""
    files = (directory / f"checkpoint-{STEPS}").iterdir()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tell(demo: Demo, nodes: list[Node]) -> None:
    report, figures = demo.report, demo.report.figures
    expected = demo.run_undisturbed()
    report.mark("reference", f"{STEPS} steps without SpotWarp, weights {expected[:16]}")
    nodes.append(demo.node("A"))
    lost, killed_s = train_until_lost(demo, nodes[-1])
    nodes.append(demo.node("B"))
    found = resume(demo, nodes[-1], lost, killed_s)
    figures.bit_identical = report.check(
        f"final weights {found} differ from {expected}, or their files do",
        holds=found == expected and final_files(demo.workspace) == final_files(demo.base / "undisturbed"),
    )
    status = nodes[-1].status()
    figures.bytes_fetched = status["totals"]["bytes_fetched"]
    figures.bytes_logical = status["logical_bytes"]
    nodes[-1].umount()
    nodes[-1].pids = []
    figures.bytes_stored = demo.bytes_stored()
    report.mark("umount", "everything is published")
    report.is_complete = True


def show_logs(base: Path) -> None:
    for log in sorted([*base.glob("*.log"), *base.glob("disk-*/**/*.log")]):
        if log.stat().st_size:
            print(f"--- {log.relative_to(base)}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)


@contextlib.contextmanager
def all_cleaned_up(nodes: list[Node]) -> Iterator[None]:
    """Leave nothing running or mounted, however the body ends."""
    try:
        yield
    finally:
        for node in nodes:
            node.clean_up()


def perform(base: Path, report: Report) -> None:
    """Run the whole demo in *base*, at most DEMO_S_MAX seconds long."""
    nodes: list[Node] = []

    def give_up(number: int, frame: FrameType | None) -> None:
        # Ending the daemons aborts their mounts, so that even a call that hangs in one comes back.
        end([pid for node in nodes for pid in node.pids])
        raise DemoFailed(f"the demo was ended by signal {number} (its limit is {DEMO_S_MAX} s)")

    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEMO_S_MAX)
    server_directory = base / "s3"
    server_directory.mkdir()
    try:
        with seaweed(server_directory) as server, all_cleaned_up(nodes):
            tell(Demo(base, report, server), nodes)
    except (DemoFailed, OSError, subprocess.SubprocessError) as error:
        report.errors.append(str(error))
        show_logs(base)
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.add_argument("--keep", action="store_true", help="leave the demo's directory behind")
    options = parser.parse_args()
    report = Report(Console())
    base = Path(tempfile.mkdtemp(prefix="spotwarp-demo-"))
    try:
        perform(base, report)
    except KeyboardInterrupt:
        report.errors.append("interrupted")
    finally:
        if options.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base)
    report.show()
    if options.json:
        print(report.to_json())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
