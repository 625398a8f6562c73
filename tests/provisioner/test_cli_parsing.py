"""What people type: read as meant, or refused with the option, the text and an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from provisioner.cli import parsing
from provisioner.cli.failover import command as failover
from provisioner.cli.secret_input import read_environment_file, read_image_login
from provisioner.cli.wishing import Ordered, check_command, ordered
from provisioner.core.errors import BadWish
from provisioner.core.gpus import Gpu
from provisioner.core.jobs import decode_spec, encode_spec

SECRET = "hunter2-of-the-job"


def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Ordered:
    """Let click parse a command line, and read what it gives."""
    monkeypatch.setenv("SPOTWARP_STATE_DIR", str(tmp_path / "state"))
    context: click.Context = failover.make_context("failover", list(arguments))
    given: dict[str, Any] = dict(context.params)
    return ordered(given.pop("command_line"), given, tmp_path)


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ordered]:
    return lambda *arguments: read(tmp_path, monkeypatch, *arguments)


def test_every_option_reaches_the_spec(reading: Callable[..., Ordered], tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    order = reading(
        "--providers", "vast,local-a", "--gpu", "A100 80GB", "--gpus", "2", "--max-price", "1.20", "--on-demand-max",
        "2.5", "--from", "code", "--disk", "200G", "--image", "some/image:1", "--region", "EU,US", "--min-up",
        "500mbps", "--min-down", "1gbps", "--min-reliability", "95%", "--budget", "200", "--race-budget", "3",
        "--candidates", "4", "--bid", "0.8", "--keep-lost", "30m", "--move-below", "25%", "--crashes", "5",
        "--interval", "10s", "--mode", "directory", "--checkpoint-path", "out/ckpt", "--workspace", "run7", "--job",
        "llama", "--checkpoint-size", "94G", "--checkpoint-every", "30m", "--", "python", "train.py", "--lr", "1",
    )  # fmt: skip
    spec, wish, limits = order.spec, order.spec.wish, order.spec.limits
    assert (spec.job, spec.workspace, spec.command) == ("llama", "run7", ("python", "train.py", "--lr", "1"))
    assert (spec.providers, spec.image, spec.candidates_max) == (("vast", "local-a"), "some/image:1", 4)
    assert (spec.bid_usd_h, spec.interval, spec.form, spec.checkpoint_path) == (0.8, "10s", "directory", "out/ckpt")
    assert (str(wish.gpu), wish.gpu_count, wish.disk_gb) == ("A100 80GB", 2, 200.0)
    assert (wish.max_price_usd_gpu_h, wish.on_demand_max_usd_gpu_h, wish.regions) == (1.2, 2.5, ("EU", "US"))
    assert (wish.up_mbps_min, wish.down_mbps_min, wish.reliability_min) == (500.0, 1000.0, 0.95)
    assert (limits.budget_usd, limits.race_budget_usd, limits.crashes_max) == (200.0, 3.0, 5)
    assert (limits.keep_lost_s, limits.move_below) == (1800.0, 0.25)
    assert (order.checkpoint_gb, order.checkpoint_every_s, order.directory) == (94.0, 1800.0, tmp_path / "code")
    assert decode_spec(encode_spec(spec)) == spec


def test_a_job_on_this_machine_needs_no_option(reading: Callable[..., Ordered]) -> None:
    order = reading("--providers", "local-a,local-b", "--", "true")
    assert order.spec.image == ""
    assert order.spec.wish.gpu.means(Gpu("CPU", 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--providers", "vats"], "--providers: no provider is named 'vats', did you mean vast?; known are vast, "
         "runpod, local and local-NAME"),
        (["--providers", ","], "--providers ',': write at least one name; several are separated by commas"),
        (["--gpu", "L4", "--gpus", "17"], "--gpus 17: a workspace has one writer node, and no machine on the market "
         "has more than 16 GPUs; give each node of a larger job a workspace and a job of its own"),
        (["--gpu", "L4", "--gpus", "0"], "--gpus 0: write how many GPUs of one machine the command uses, at least 1"),
        ([], "--gpu is missing: say which GPU the command needs, as in --gpu 'A100 80GB'"),
        (["--gpu", "80GB"], "--gpu '80GB': write a model, as in 'A100 80GB' or 'RTX 4090'"),
        (["--gpu", "L4", "--max-price", "cheap"], "--max-price cheap: write dollars above zero, as in 1.20"),
        (["--gpu", "L4", "--on-demand-max", "nan"], "--on-demand-max nan: write dollars above zero, as in 1.20"),
        (["--gpu", "L4", "--budget", "0"], "--budget 0: write dollars above zero, as in 1.20"),
        (["--gpu", "L4", "--min-up", "500"], "--min-up 500: write megabits or gigabits per second, as in 500mbps "
         "or 1gbps"),
        (["--gpu", "L4", "--disk", "big"], "--disk big: write a size in GB as providers bill it, as in 200G or 1.5T"),
        (["--gpu", "L4", "--bid", "low"], "--bid low: write auto (the lowest bid times 1.15) or dollars per hour"),
        (["--gpu", "L4", "--move-below", "30"], "--move-below 30: write a share, as in 25% or 0.25"),
        (["--gpu", "L4", "--candidates", "9"], "--candidates 9: write a number from 1 to 8"),
        (["--gpu", "L4", "--crashes", "-1"], "--crashes -1: write a number from 0 to 1000"),
        (["--gpu", "L4", "--interval", "0.5s"], "--interval 0.5s: the least is 1s"),
        (["--gpu", "L4", "--checkpoint-path", "/out"], "--checkpoint-path /out: write a directory in the workspace, "
         "without / in front and .."),
        (["--gpu", "L4", "--job", "My Job"], "--job: job name 'My Job': use 1 to 100 of a-z, 0-9 and '-', with no '-' "
         "at either end"),
        (["--gpu", "L4", "--workspace", "A B"], "--workspace: 'A B' cannot name a workspace; use up to 63 of a-z, "
         "0-9, '.', '_' and '-', a letter or digit first"),
        (["--gpu", "L4", "--from", "nowhere"], "--from nowhere: is no directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(reading: Callable[..., Ordered], arguments: list[str], message: str) -> None:
    with pytest.raises(BadWish) as caught:
        reading(*arguments, "--", "true")
    assert str(caught.value) == message


@pytest.mark.parametrize("words", [(), ("",), ("  ", "x")])
def test_a_command_that_says_nothing(reading: Callable[..., Ordered], words: tuple[str, ...]) -> None:
    with pytest.raises(BadWish, match="say what to keep running: `spotwarp failover"):
        check_command(reading("--gpu", "L4", "--", *words).spec)


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_an_environment_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    text = f"# keys\n\nexport HF_TOKEN={SECRET}\nNAME = 'two words'\nEMPTY=\nURL=https://x/?a=b\n"
    found = read_environment_file(private(tmp_path / "env", text))
    assert found == {"HF_TOKEN": SECRET, "NAME": "two words", "EMPTY": "", "URL": "https://x/?a=b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SECRET}\n", ":1: expected NAME=VALUE with a name of letters, digits and _"),
        (f"A=1\n2B={SECRET}\n", ":2: expected NAME=VALUE with a name of letters, digits and _"),
        (f"A={SECRET}\nA=2\n", ":2: A is set twice"),
        (f"VAST_API_KEY={SECRET}\n", ":1: VAST_API_KEY belongs to the account and is never given to a node"),
        (f"SPOTWARP_STORE={SECRET}\n", ":1: SPOTWARP_STORE is SpotWarp's own; set it here and the node gets it"),
        ("".join(f"V{n}={SECRET}\n" for n in range(41)), " has 41 variables, the most is 40"),
    ],
)
def test_a_line_that_is_none_is_named_by_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = private(tmp_path / "env", text)
    with pytest.raises(BadWish) as caught:
        read_environment_file(path)
    assert str(caught.value) == f"--env-file {path}{message}"
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_secrets_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "env", f"A={SECRET}\n", mode)
    with pytest.raises(BadWish) as caught:
        read_environment_file(path)
    assert str(caught.value) == f"--env-file {path} has mode {mode:04o}, which lets others in; run: chmod 600 {path}"


def test_a_login_in_the_form_each_provider_takes(tmp_path: Path) -> None:
    login = read_image_login(private(tmp_path / "login", f"user=me\npassword={SECRET}\nrunpod=cl1\n"))
    assert login.told_to("vast") == f"-u me -p {SECRET} docker.io"
    assert login.told_to("runpod") == "cl1"
    assert SECRET not in repr(login)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user=me\n", ": user and password belong together; one of them is missing"),
        ("registry=ghcr.io\n", ": has neither user and password nor runpod=ID; see docs/OPERATIONS.md"),
        (f"me:{SECRET}\n", ":1: expected one of registry, user, password, runpod, each with =VALUE"),
        (f"user=me\npassword={SECRET} x\n", ": a value with a blank in it cannot be passed to a provider"),
    ],
)
def test_a_login_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    path = private(tmp_path / "login", text)
    with pytest.raises(BadWish) as caught:
        read_image_login(path)
    assert str(caught.value) == f"--image-login {path}{message}"


def test_nothing_that_was_ordered_shows_a_secret(reading: Callable[..., Ordered], tmp_path: Path) -> None:
    private(tmp_path / "env", f"A={SECRET}\n")
    private(tmp_path / "login", f"user=me\npassword={SECRET}\n")
    order = reading("--gpu", "L4", "--env-file", "env", "--image-login", "login", "--", "true")
    assert order.environment == {"A": SECRET}
    assert SECRET not in repr(order)
    assert SECRET not in encode_spec(order.spec).decode()


def test_names_of_workspaces_become_names_of_jobs() -> None:
    assert parsing.job_of_workspace("_.._") == "job"
    assert parsing.job_name("--job", parsing.job_of_workspace("ada-my_run.7")) == "ada-my-run-7"
