"""A job of half a day for tests of reports: three losses, a planned move, losers, a node that is still there."""

from __future__ import annotations

from provisioner.cli.facts import JobFacts
from provisioner.core.gpus import parse_gpu
from provisioner.core.happenings import Failover
from provisioner.core.intents import Intent, IntentRecord, IntentState, label_of
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Market
from provisioner.core.rendezvous import NodePhase, Report
from provisioner.core.wishes import Wish

BEGAN_S = 1_800_000_000.0
HOUR_S = 3600.0
SECRET = "hunter2-of-the-job"


def record(
    ident: str, provider: str, from_s: float, until_s: float, *, won_at_s: float | None = None, alive: bool = False
) -> IntentRecord:
    race, serial = ident.split("-")
    intent = Intent(
        ident=ident,
        label=label_of("llama", race, int(serial)),
        provider=provider,
        offer_id="1",
        market=Market.SPOT,
        gpu="A100 SXM 80GB",
        gpu_count=1,
        location="Sweden, SE",
        machine_id="77",
        usd_h=0.9,
        compute_usd_h=0.8,
        written_at_s=BEGAN_S + from_s,
    )
    state = IntentState.WINNER if alive else IntentState.GONE
    why = "" if won_at_s is not None else "lost the race"
    won = None if won_at_s is None else BEGAN_S + won_at_s
    return IntentRecord(intent, state, BEGAN_S + until_s, (f"i-{ident}",), why, won_at_s=won)


def failover(number: int, kind: str, at_s: float, winner: str, lost: str | None, **changes: object) -> Failover:
    fields: dict[str, object] = {
        "number": number, "kind": kind, "why": "the provider says stopped <outbid>", "lost_at_s": BEGAN_S + at_s,
        "detected_at_s": BEGAN_S + at_s + 12, "won_at_s": BEGAN_S + at_s + 70, "winner": winner, "provider": "vast",
        "gpu": "1 x A100 SXM 80GB", "usd_h": 0.9, "lost": lost, "candidates": 3, "reaped": 2, "detect_s": 12.0,
        "race_s": 3.0, "boot_s": 31.0, "checks_s": 12.0, "claim_s": 2.0, "first_read_s": 4.0, "ready_s": 74.0,
        "state_age_s": 20.0, "racing_usd": 0.05,
    }  # fmt: skip
    return Failover(**{**fields, **changes})  # type: ignore[arg-type]


def facts(*, running: bool = True) -> JobFacts:
    wish = Wish(parse_gpu("A100 80GB"))
    spec = JobSpec("llama", "llama", ("python", "train.py", "--lr", "1e-4"), ("vast",), wish, on_demand_usd_h=1.9)
    records = (
        record("00000001-1", "vast", 0, 4 * HOUR_S, won_at_s=60),
        record("00000001-2", "runpod", 1, 90),
        record("00000002-1", "runpod", 4 * HOUR_S, 7 * HOUR_S, won_at_s=4 * HOUR_S + 70),
        record("00000002-2", "vast", 4 * HOUR_S + 3, 4 * HOUR_S + 100),
        record("00000003-1", "vast", 7 * HOUR_S, 9 * HOUR_S + 120, won_at_s=7 * HOUR_S + 70),
        record("00000004-1", "vast", 9 * HOUR_S, 12 * HOUR_S, won_at_s=9 * HOUR_S + 100, alive=running),
    )
    failovers = (
        failover(1, "launch", 0, "00000001-1", None, detect_s=0.0, why="the job was begun"),
        failover(2, "loss", 4 * HOUR_S, "00000002-1", "00000001-1"),
        failover(3, "drill", 7 * HOUR_S, "00000003-1", "00000002-1", boot_s=180.0, ready_s=220.0, state_age_s=600.0),
        failover(4, "move", 9 * HOUR_S, "00000004-1", "00000003-1", state_age_s=0.0, why="an offer is 30 % cheaper"),
    )
    reports = {}
    for one in records:
        written_s = one.intent.written_at_s
        times = {"booted": written_s + 35, "ready": written_s + 50, "running": written_s + 74}
        reports[one.intent.ident] = Report(one.intent.ident, 3, NodePhase.RUNNING, times=times)
    if not running:
        last = reports["00000004-1"]
        reports["00000004-1"] = Report(last.ident, 9, NodePhase.ENDED, exit_code=0, times=last.times)
    return JobFacts("llama", spec, None, records, reports, failovers)
