"""Tell the main job as a story: a rented node trains, is lost in mid-save, and another one goes on to the same bits.

`spotwarp failover` does it all, on the local provider: two "providers" on this machine, whose nodes are processes with
disks of their own. In each failover one candidate boots slowly and one dies in its boot. Invariant: whatever happens,
nothing outlives the demo: no process, no mount, and (without --keep) no file.
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import demo_corpus
import trio
from demo_job import Event, Job, spotwarp
from demo_rented import DemoFailed, RentedNode, node_of
from demo_report import Report
from demo_trainer import SCRIPT, TrainerProcess
from rich.console import Console
from seaweed import Seaweed, seaweed

from provisioner.providers.disks import delete_tree
from provisioner.providers.processes import kill_all, unmount_under

STEPS, SAVE_EVERY = 300, 50
KILL_STEPS = {1: [200], 2: [150, 250], 3: [100, 200, 250], 4: [100, 150, 200, 250]}
"""The node is lost while the checkpoint of this step is being written; by how often it is to be lost."""
BUCKET, JOB = "demo", "demo"
PROVIDERS = ("local-a", "local-b")
DEMO_S_MAX = 120
LOSS_S_MAX = 60
"""What each loss may add to it."""
READ_S_MAX = 20.0


def local_machines(losses: int) -> str:
    """Say how nodes boot: the first of each provider as they can, the next ones slowly, or not at all."""
    slow, dies = "sleep 4", "sleep 1; exit 1"
    boots = [[""], [""]]
    for loss in range(losses):
        boots[loss % 2].append(slow)
        boots[1 - loss % 2].append(dies)
    # Nobody knows how many candidates a race needs: what comes after these boots as it can.
    return json.dumps({name: {"slots": 8, "boots": boot} for name, boot in zip(PROVIDERS, boots, strict=True)})


class Demo:
    """The places, the bucket, the controller and the report that the acts share."""

    def __init__(self, base: Path, report: Report, server: Seaweed, losses: int) -> None:
        self.base = base
        self.report = report
        self.server = server
        self.losses = losses
        self.home = base / "home"
        self.home.mkdir()
        self.given = {**server.environment, "SPOTWARP_INTERNAL_LOCAL": local_machines(losses)}
        self.job: Job | None = None
        server.create_bucket(BUCKET)

    @property
    def store(self) -> str:
        return self.server.url(BUCKET, "runs")

    @property
    def nodes(self) -> Path:
        return self.home / "state" / "nodes"

    def undisturbed(self) -> TrainerProcess:
        """Begin to train in a plain directory, from start to end."""
        directory = self.base / "undisturbed"
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "corpus.txt").write_bytes(demo_corpus.gather())
        return TrainerProcess(directory, steps=STEPS, save_every=SAVE_EVERY)

    def rent(self) -> Job:
        """Start the controller on a workspace that begins with the script and the text."""
        source = self.base / "source"
        (source / "data").mkdir(parents=True)
        shutil.copy(self.base / "undisturbed" / "data" / "corpus.txt", source / "data")
        shutil.copy(SCRIPT, source / "train.py")
        trainer = [sys.executable, "train.py", "--dir", ".", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        arguments = ["--providers", ",".join(PROVIDERS), "--store", self.store, "--workspace", JOB, "--job", JOB]
        self.job = Job(
            self.home, self.given, [*arguments, "--interval", "1s", "--from", str(source), "--", *trainer], self._seen
        )
        return self.job

    def _seen(self, event: Event) -> None:
        told = words_of(event)
        if told:
            self.report.mark(*told, at_s=monotonic(event["at_s"]))

    def spotwarp(self, *arguments: str) -> str:
        return spotwarp(self.home, self.given, *arguments)

    def bytes_stored(self) -> int:
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))

    def clean_up(self) -> None:
        """End the controller and every node that is left."""
        if self.job is not None:
            self.job.kill()
        for record in self.nodes.glob("*/*/record.json"):
            trio.run(ended, record.parent)
            delete_tree(record.parent)


async def ended(node: Path) -> None:
    """End a node's processes and mounts."""
    await kill_all(str(node))
    await unmount_under(node)


def monotonic(at_s: float) -> float:
    """Turn a time of day into this process's clock."""
    return time.monotonic() - (time.time() - at_s)


def words_of(event: Event) -> tuple[str, str] | None:
    """Say an event of the controller in a line of the timeline, or None for what a newcomer need not see."""
    match event["event"]:
        case "OffersSeen":
            return "offers", ", ".join(f"{name} {count}" for name, count in event["fitting"].items()) or "none"
        case "CandidateMoved" if event["phase"] in ("requested", "winner", "reaping", "gone"):
            said = f" ({event['text']})" if event["text"] else ""
            return event["phase"], f"{event['ident']} on {event['provider']}{said}"
        case "NodeSaid" if event["phase"] in ("booted", "ready", "running"):
            return event["phase"], event["ident"]
        case "Judged" if event["health"] in ("suspect", "lost"):
            return event["health"], f"{event['ident']}: {event['why']}"
    return None


def half_written(node: RentedNode, step: int) -> None:
    """Wait until the first file of a checkpoint has bytes."""
    node.wait_for("saving", step)
    first = node.workspace / f"checkpoint-{step}" / "model.npz"
    deadline_s = time.monotonic() + READ_S_MAX
    while not (first.exists() and first.stat().st_size):
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"{first} never came to hold a byte")
        time.sleep(0.001)


def lose(demo: Demo, node: RentedNode, step: int) -> float:
    """Let the node die with SIGKILL while the checkpoint of *step* is being written; return when."""
    report, figures = demo.report, demo.report.figures
    node.wait_for("step", step - SAVE_EVERY // 2)
    half_written(node, step)
    killed_s = node.lose()
    report.mark("kill", f"SIGKILL while checkpoint-{step} was being written; the disk is gone", monotonic(killed_s))
    in_mid_save = report.check(
        f"checkpoint-{step} was complete before the kill", holds=not node.has_said("saved", step)
    )
    figures.killed_in_mid_save = in_mid_save and figures.killed_in_mid_save is not False
    if figures.kill_step is None:
        figures.kill_step = step
    return killed_s


def come_back(demo: Demo, lost: RentedNode, step: int, killed_s: float, number: int) -> RentedNode:
    """Wait until another node trains again, and note what the failover cost."""
    report, figures = demo.report, demo.report.figures
    assert demo.job is not None
    record = demo.job.failover(number)
    node = node_of(demo.nodes, record["winner"])
    resumed, first = node.wait_for("resumed"), node.wait_for("step")
    report.mark("resumed", f"from checkpoint-{resumed.step}; step {first.step} is done", monotonic(first.at_s))
    phases = {name: record[name] for name in ("race_s", "boot_s", "claim_s", "first_read_s")}
    report.failovers.append(
        {
            "detect_s": round(record["detected_at_s"] - killed_s, 3),
            **{name: None if value is None else round(value, 3) for name, value in phases.items()},
            "ready_s": round(record["lost_at_s"] + record["ready_s"] - killed_s, 3),
            "step_s": round(first.at_s - killed_s, 3),
            "steps_lost": step - resumed.step,
            "winner": f"{record['provider']} {record['winner']}",
            "reaped": record["reaped"],
        }
    )
    if figures.resumed_step is None:
        trained = lost if any(line.word == "step" and line.step == resumed.step for line in lost.lines) else None
        figures.resumed_step, figures.steps_lost = resumed.step, step - resumed.step
        figures.seconds_lost = (
            None if trained is None else round(killed_s - trained.wait_for("step", resumed.step).at_s, 3)
        )
        figures.mount_s = report.failovers[-1]["claim_s"]
        figures.first_read_s = report.failovers[-1]["first_read_s"]
        figures.rto_s = report.failovers[-1]["step_s"]
        figures.bytes_fetched = fetched(demo, node)
    return node


def fetched(demo: Demo, node: RentedNode) -> int:
    """Ask the node's own daemon what it has read from the store."""
    state = next(node.home.glob("disk/spotwarp-*/state"))
    told = spotwarp(
        state.parent, {**demo.given, "SPOTWARP_STATE_DIR": str(state)}, "status", str(node.workspace), "--json"
    )
    document: dict[str, Any] = json.loads(told.splitlines()[-1])
    return int(document["totals"]["bytes_fetched"])


def final_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the last checkpoint."""
    files = (directory / f"checkpoint-{STEPS}").iterdir()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_log(demo: Demo, log: Path) -> bool:
    """Require of the log that each life's lines are those of the undisturbed run, one after the other, none torn."""
    expected = (demo.base / "undisturbed" / "train.log").read_text().splitlines()
    at = 0
    for line in log.read_text(errors="replace").splitlines():
        number = expected.index(line) if line in expected else -1
        if number != at and not 0 <= number < at:
            return False
        at = number + 1
    return at == len(expected)


def tell(demo: Demo) -> None:
    report, figures = demo.report, demo.report.figures
    undisturbed = demo.undisturbed()
    try:
        job = demo.rent()
        node = node_of(demo.nodes, job.failover(1)["winner"])
        report.mark("write", "the trainer took its first step", monotonic(node.wait_for("step", 1).at_s))
        for number, step in enumerate(KILL_STEPS[demo.losses], start=2):
            killed_s = lose(demo, node, step)
            node = come_back(demo, node, step, killed_s, number)
        found = node.wait_for("done").rest
        report.mark("finished", f"step {STEPS}")
        job.finish()
        node.stop()
        expected = undisturbed.finish()
    finally:
        undisturbed.kill()
    copied = demo.base / "copied"
    copied.mkdir()
    for name in (f"checkpoint-{STEPS}", "train.log"):
        demo.spotwarp("cp", "-r", "--store", demo.store, f"{JOB}:{name}", str(copied))
    figures.bit_identical = report.check(
        f"final weights {found} differ from {expected}, or their files do",
        holds=found == expected and final_files(copied) == final_files(demo.base / "undisturbed"),
    )
    figures.log_is_prefix = report.check(
        "train.log is not what the undisturbed run wrote, life by life", holds=check_log(demo, copied / "train.log")
    )
    figures.bytes_logical = logical_bytes(demo)
    figures.bytes_stored = demo.bytes_stored()
    left = [record.parent for record in demo.nodes.glob("*/*/record.json")]
    report.check(f"nodes are left: {left}", holds=not left)
    report.mark("umount", "everything is published, and every node is gone")
    report.is_complete = True


def logical_bytes(demo: Demo) -> int:
    """Ask the store how large the workspace is."""
    found: dict[str, Any] = json.loads(demo.spotwarp("ls", "--store", demo.store, "--json").splitlines()[-1])
    return next(int(line["logical_bytes"]) for line in found["workspaces"] if line["name"] == JOB)


def show_logs(base: Path) -> None:
    for log in sorted([*base.glob("*.log"), *base.glob("home/*.log"), *base.glob("home/state/nodes/*/*/node.log")]):
        if log.stat().st_size:
            print(f"--- {log.relative_to(base)}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)


@contextlib.contextmanager
def all_cleaned_up(demo: Demo) -> Iterator[None]:
    """Leave nothing running or mounted, however the body ends."""
    try:
        yield
    except (DemoFailed, OSError, subprocess.SubprocessError):
        show_logs(demo.base)
        raise
    finally:
        demo.clean_up()


def perform(base: Path, report: Report, losses: int) -> None:
    """Run the whole demo in *base*, in limited time."""
    limit_s = DEMO_S_MAX + LOSS_S_MAX * losses

    def give_up(number: int, frame: FrameType | None) -> None:
        raise DemoFailed(f"the demo was ended by signal {number} (its limit is {limit_s} s)")

    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    server_directory = base / "s3"
    server_directory.mkdir()
    try:
        with seaweed(server_directory) as server:
            demo = Demo(base, report, server, losses)
            with all_cleaned_up(demo):
                tell(demo)
    except (DemoFailed, OSError, subprocess.SubprocessError) as error:
        report.errors.append(str(error))
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.add_argument("--keep", action="store_true", help="leave the demo's directory behind")
    parser.add_argument(
        "--preemptions", type=int, default=1, choices=sorted(KILL_STEPS), help="how often the node is lost"
    )
    options = parser.parse_args()
    report = Report(Console())
    base = Path(tempfile.mkdtemp(prefix="spotwarp-demo-"))
    try:
        perform(base, report, options.preemptions)
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
