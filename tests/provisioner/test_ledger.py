"""Is what was written still there after a kill, and is what cannot be read never guessed?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core.blocklist import Blocked
from provisioner.core.errors import LedgerCorrupt
from provisioner.core.happenings import Failover
from provisioner.core.intents import TRANSITIONS, IntentRecord, IntentState, advanced, further
from provisioner.engine import EnginePorts, EngineSettings, Me
from provisioner.engine.books import IMAGE_KEPT_S, Books
from provisioner.engine.outbox import Outbox
from provisioner.ledger import LmdbLedger
from provisioner.system import SystemEntropy
from tests.support.failover_store import Bucket, View
from tests.support.failover_world import SPEC, launch_of
from tests.support.race_world import incumbent_record

RECORD = replace(incumbent_record(), state=IntentState.WRITTEN, instances=())
STATES = st.sampled_from(list(IntentState))


def test_everything_is_read_back(tmp_path: Path) -> None:
    ledger = LmdbLedger(tmp_path / "ledger")
    failovers = [Failover(number, "loss", "gone", 1.0, 2.0, notes=("a", "b")) for number in (2, 1, 10)]
    ledger.append("job", RECORD)
    ledger.append("job", replace(RECORD, state=IntentState.RENTED, instances=("i1",)))
    ledger.append("job-2", RECORD)
    for failover in failovers:
        ledger.add_failover("job", failover)
    ledger.block(Blocked("vast", "machine", "m1", 100.0, "dead GPU"), 1.0)
    ledger.keep_spec(SPEC)
    ledger.close()
    again = LmdbLedger(tmp_path / "ledger")
    (record,) = again.records("job")
    assert (record.state, record.instances) == (IntentState.RENTED, ("i1",))
    assert [one.state for one in again.records("job-2")] == [IntentState.WRITTEN]
    assert again.records("jo") == []
    assert [one.number for one in again.failovers("job")] == [1, 2, 10]
    assert again.failovers("job")[0] == failovers[1]
    assert [entry.subject for entry in again.blocklist().entries] == ["m1"]
    assert again.spec("job") == SPEC
    assert again.spec("nobody") is None
    assert again.jobs() == ["job", "job-2"]
    again.close()


def test_machines_that_ran_the_image_are_known_from_all_jobs_of_this_machine(tmp_path: Path) -> None:
    ledger = LmdbLedger(tmp_path / "ledger")
    now_s = 10 * IMAGE_KEPT_S

    def ran(job: str, machine: str | None, at_s: float = now_s, **how: object) -> None:
        intent = replace(RECORD.intent, ident=f"00c0ffee-{len(ledger.records(job)) + 1}", machine_id=machine)
        ledger.append(job, replace(RECORD, intent=intent, state=IntentState.GONE, at_s=at_s, **how))  # type: ignore[arg-type]

    ledger.keep_spec(replace(SPEC, job="same"))
    ledger.keep_spec(replace(SPEC, job="other", image="other/image:1"))
    ran("same", "won", won_at_s=1.0)
    ran("same", "was-ready", permitted_writer_epoch=3)
    ran("same", "never-ready", instances=("i1",))
    ran("same", "long-ago", at_s=now_s - IMAGE_KEPT_S - 1, won_at_s=1.0)
    ran("same", None, won_at_s=1.0)
    ran("other", "another-image", won_at_s=1.0)
    ran(SPEC.job, "own", won_at_s=1.0)

    class Wall:
        def now_s(self) -> float:
            return now_s

    bucket = View(Bucket())
    settings = EngineSettings()
    ports = EnginePorts({}, bucket, bucket, ledger, Wall(), SystemEntropy(), launch_of, Me("here", 1), settings)
    books = Books(SPEC, ports, Outbox(bucket, settings, print))

    async def main() -> None:
        await books.recover()

    trio.run(main)
    assert books.machines_with_image() == {("vast", "won"), ("vast", "was-ready"), ("vast", "own")}
    ledger.close()


def test_two_processes_block_machines_at_once(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from provisioner.core.blocklist import Blocked
        from provisioner.ledger import LmdbLedger
        ledger = LmdbLedger(Path(sys.argv[1]))
        for number in range(50):
            ledger.block(Blocked("vast", "machine", f"{sys.argv[2]}-{number}", 1e9, "broken"), 1.0)
    """)
    path = tmp_path / "ledger"
    LmdbLedger(path).close()
    running = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("a", "b")]
    assert [process.wait(60) for process in running] == [0, 0]
    ledger = LmdbLedger(path)
    assert len(ledger.blocklist().entries) == 100
    ledger.close()


def test_what_was_appended_survives_a_kill(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from dataclasses import replace
        from pathlib import Path
        from provisioner.ledger import LmdbLedger
        from tests.support.race_world import incumbent_record
        ledger = LmdbLedger(Path(sys.argv[1]))
        number = 0
        while True:
            number += 1
            record = incumbent_record()
            ledger.append("job", replace(record, intent=replace(record.intent, ident=f"00c0ffee-{number}")))
            print(number, flush=True)
    """)
    path = tmp_path / "ledger"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines() if line.strip()]
    process.wait(30)
    process.stdout.close()
    ledger = LmdbLedger(path)
    kept = {int(record.intent.ident.split("-")[1]) for record in ledger.records("job")}
    assert set(said) <= kept
    ledger.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"i/job/00c0ffee-1", b"{}"), (b"f/job/000001", b"\x00"), (b"b", b"[]"), (b"s/job", b'{"version":99}')],
)
def test_a_value_that_cannot_be_read_is_named_and_never_guessed(tmp_path: Path, key: bytes, value: bytes) -> None:
    path = tmp_path / "ledger"
    LmdbLedger(path).close()
    with lmdb.open(str(path)) as env, env.begin(write=True) as transaction:
        transaction.put(key, value)
    ledger = LmdbLedger(path)
    read = {b"i": ledger.records, b"f": ledger.failovers, b"s": ledger.spec}.get(
        key[:1], lambda _job: ledger.blocklist()
    )
    with pytest.raises(LedgerCorrupt, match=key.decode()):
        read("job")
    ledger.close()


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    LmdbLedger(path).close()
    (path / "data.mdb").write_bytes(b"\xff" * 20_000)
    with pytest.raises(LedgerCorrupt, match="mirror"):
        LmdbLedger(path)


@given(st.lists(STATES, max_size=8), st.lists(STATES, max_size=8))
def test_the_further_of_two_records_counts(first: list[IntentState], second: list[IntentState]) -> None:
    """Two copies of one history, one of which has missed its end: the longer one counts."""

    def walk(record: IntentRecord, states: list[IntentState]) -> IntentRecord:
        for state in states:
            if state in TRANSITIONS[record.state]:
                record = advanced(record, state, record.at_s + 1.0)
        return record

    short = walk(RECORD, first)
    long = walk(short, second)
    assert further(short, long).state is long.state
    assert further(long, short) == further(short, long)
    assert further(long, long) == long
