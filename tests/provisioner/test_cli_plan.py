"""`spotwarp plan` against both simulators over loopback, with the real adapters: what it says, and each bad input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.command_line import CommandLine
from tests.support.faulty_s3 import faulty_s3
from tests.support.simulator_process import KEYS, simulator

GPU = ("--gpu", "RTX 4090", "--store", "s3://bucket/runs")
UNREACHABLE = {"SPOTWARP_S3_ENDPOINT": "http://127.0.0.1:9"}
S3_KEYS = {"SPOTWARP_S3_ACCESS_KEY_ID": "id", "SPOTWARP_S3_SECRET_ACCESS_KEY": "secret-key-of-the-store"}


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Both providers, and a store, on loopback."""
    with simulator(tmp_path_factory.mktemp("market")) as variables, faulty_s3() as (url, _):
        yield {**variables, "SPOTWARP_S3_ENDPOINT": url, **S3_KEYS}


@pytest.fixture
def cli(tmp_path: Path, market: Mapping[str, str]) -> CommandLine:
    store = f"file://{tmp_path / 'store'}"
    return CommandLine(tmp_path, store, {**market, "COLUMNS": "160"})


def planned(cli: CommandLine, *arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(cli.here("plan", *arguments, "--json", code=code)))


@pytest.fixture(scope="module")
def plan(market: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One plan that several tests look at; its store does not answer, so there is no history."""
    base = tmp_path_factory.mktemp("plan")
    cli = CommandLine(base, f"file://{base}", {**market, **UNREACHABLE})
    options = ("--checkpoint-size", "2G", "--checkpoint-every", "10m", "--on-demand-max", "2", "--json")
    return dict(json.loads(cli.ok("plan", *GPU, *options, "--", "true")))


def test_a_plan_has_offers_of_both_providers(plan: dict[str, Any]) -> None:
    assert {offer["provider"] for offer in plan["offers"]} == {"vast", "runpod"}
    assert plan["can_start"]
    assert plan["feasible"]
    assert plan["problems"] == []
    for offer in plan["offers"]:
        assert "RTX 4090" in offer["gpu"]
        ready = ("detect", "race", "boot", "checks", "claim", "first_read")
        assert offer["ready_s"] == pytest.approx(sum(offer["phases_s"][name] for name in ready))
        assert offer["step_s"] == pytest.approx(sum(offer["phases_s"].values()))
        parts = offer["usd_h"]
        assert parts["total"] == pytest.approx(sum(value for name, value in parts.items() if name != "total"))
        assert offer["loss_max_s"] > offer["loss_mean_s"] > 0


def test_a_plan_knows_what_on_demand_costs(plan: dict[str, Any]) -> None:
    on_demand = [offer for offer in plan["offers"] if offer["market"] == "on-demand"]
    least = min(offer["usd_gpu_h"] for offer in on_demand)
    assert plan["on_demand_usd_h"] == pytest.approx(least)


def test_a_plan_says_where_its_figures_are_from(plan: dict[str, Any]) -> None:
    assert plan["workload"]["sources"] == [
        "checkpoint size: --checkpoint-size",
        "checkpoint cadence: --checkpoint-every",
    ]
    assert plan["workload"]["up_gb_h"] == pytest.approx(12.0)
    assert any("does not answer" in warning or "did not answer" in warning for warning in plan["warnings"])


def test_a_large_checkpoint_on_a_slow_link_is_not_feasible(cli: CommandLine) -> None:
    made = planned(cli, *GPU, "--providers", "vast", "--checkpoint-size", "940G", "--checkpoint-every", "1m")
    assert not made["feasible"]
    assert made["verdict"].startswith("not at ")
    assert "checkpoint every ≥" in made["verdict"]
    assert "--min-up" in made["verdict"]


def test_a_directory_tells_what_a_checkpoint_weighs_and_what_is_not_saved(cli: CommandLine, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for number, at_s in ((1, 1000), (2, 2800), (3, 4600)):
        part = code / "out" / f"checkpoint-{number}"
        part.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.pt"):
            (part / name).touch()
            os.truncate(part / name, 3_000_000_000)
            os.utime(part / name, (at_s, at_s))
    (code / "train.py").write_text("print(1)\n")
    (code / ".cache" / "pip").mkdir(parents=True)
    (code / ".cache" / "pip" / "wheel").write_bytes(b"x" * 5000)
    (code / "data").symlink_to("/usr/share")
    os.mkfifo(code / "pipe")
    made = planned(cli, *GPU, "--from", str(code), "--disk", "500G")
    work = made["workload"]
    assert (work["checkpoint_gb"], work["checkpoint_every_s"]) == (6.0, 1800.0)
    assert work["sources"][0] == f"checkpoint size: 3 checkpoints in {code}"
    assert made["protected"]["bytes"] > 18e9
    unsaved = made["protected"]["not"]
    assert len(unsaved) == 3
    assert unsaved[0].startswith("4.88 KiB below .cache/pip")
    assert unsaved[1].startswith("1 pipes")
    assert unsaved[2].startswith("1 links lead out of the directory")


def test_a_small_disk_is_raised_for_the_plain_directory(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.bin").touch()
    os.truncate(tmp_path / "code" / "data.bin", 100_000_000_000)
    made = planned(cli, *GPU, "--from", str(tmp_path / "code"), "--disk", "20G")
    assert made["disk_gb"] == pytest.approx(110.0)
    assert any("--disk 20G is raised to it" in warning for warning in made["warnings"])


def test_people_see_tables_and_the_verdict(cli: CommandLine) -> None:
    shown = cli.here("plan", *GPU, "--checkpoint-size", "2G", "--checkpoint-every", "10m")
    for words in ("= ready", "= step", "$/GPU-h", "vast spot", "not protected", "first safe", "verdict: feasible at"):
        assert words in shown, words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-price", "0.01"), "offers fail only --max-price, e.g. one of vast costs $"),
        (("--region", "Atlantis"), "--region excludes every one of"),
        (("--min-up", "900gbps"), "--min-up excludes every one of"),
        (("--bid", "0.001"), "offers fail only --bid, e.g. one of vast needs a bid of $"),
        (("--budget", "0.01"), "--budget 0.01 is less than one hour of the cheapest offer ($"),
    ],
)
def test_what_stands_in_the_way_is_named(cli: CommandLine, options: tuple[str, ...], words: str) -> None:
    made = planned(cli, *GPU, "--providers", "vast", "--on-demand-max", "0.01", *options, code=1)
    assert not made["can_start"]
    assert any(words in stop for stop in made["stops"]), made["stops"]


def test_an_unknown_gpu_gets_the_nearest_names(cli: CommandLine) -> None:
    made = planned(cli, "--gpu", "RTX 4900", "--store", "s3://bucket/runs", code=1)
    assert made["stops"][0].startswith("no offer of ")
    assert "is a RTX 4900; nearest names: " in made["stops"][0]
    assert "RTX 4090 24GB" in made["stops"][0]


def test_a_store_on_this_machine_is_no_place_for_rented_nodes(cli: CommandLine) -> None:
    made = planned(cli, "--gpu", "RTX 4090", code=1)
    assert made["stops"] == [
        f"the store {cli.store} is on this machine, where no rented node reaches it: set --store s3://…"
    ]


def test_a_missing_key_says_which_variable_and_where_to_get_one(cli: CommandLine) -> None:
    cli.environment = {name: value for name, value in cli.environment.items() if name != "VAST_API_KEY"}
    shown = cli.here("plan", *GPU, code=3)
    assert shown == (
        "error: vast: no account key: VAST_API_KEY is not set and ~/.config/vastai/vast_api_key has none; "
        "make one at https://cloud.vast.ai/manage-keys/, then set VAST_API_KEY\n"
    )


def test_the_vendors_own_files_hold_keys_too(cli: CommandLine, tmp_path: Path) -> None:
    cli.environment = {name: value for name, value in cli.environment.items() if name not in KEYS}
    (tmp_path / ".config" / "vastai").mkdir(parents=True)
    (tmp_path / ".config" / "vastai" / "vast_api_key").write_text(KEYS["VAST_API_KEY"] + "\n")
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod" / "config.toml").write_text(f'[default]\napi_key = "{KEYS["RUNPOD_API_KEY"]}"\n')
    assert planned(cli, *GPU, "--on-demand-max", "2")["problems"] == []


def order(cli: CommandLine, **fault: Any) -> None:
    answer = httpx.post(f"{cli.environment['VAST_URL']}/__sim/faults", json=fault)
    assert answer.status_code == 200, answer.text


def test_a_revoked_key_takes_one_provider_and_not_the_other(cli: CommandLine) -> None:
    revoked = "key-that-was-revoked"
    order(cli, kind="revoke_key", key=revoked)
    cli.environment = {**cli.environment, "VAST_API_KEY": revoked}
    made = planned(cli, *GPU, "--on-demand-max", "2")
    assert {offer["provider"] for offer in made["offers"]} == {"runpod"}
    (problem,) = made["problems"]
    assert problem.startswith("vast: search: ")
    assert "the key was revoked, or is another account's" in problem
    assert revoked not in json.dumps(made)
    alone = planned(cli, *GPU, "--providers", "vast", code=1)
    assert alone["stops"] == alone["problems"]


def test_nothing_that_a_plan_shows_holds_a_key(cli: CommandLine, plan: dict[str, Any]) -> None:
    shown = json.dumps(plan) + cli.here("plan", *GPU)
    assert not [key for key in (*KEYS.values(), *S3_KEYS.values()) if len(key) > 2 and key in shown]
