"""What was typed after `plan` and `failover` -> a `JobSpec` and what belongs to it.

Invariant: everything is checked here, before a provider is asked; what is wrong is a BadWish that names the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from provisioner.cli import parsing
from provisioner.cli.accounts import all_local
from provisioner.cli.plugged import plugged_names
from provisioner.cli.secret_input import ImageLogin, read_environment_file, read_image_login
from provisioner.core.errors import BadWish
from provisioner.core.gpus import GpuWish, parse_gpu
from provisioner.core.jobs import JobSpec, Limits
from provisioner.core.wishes import Wish
from provisioner.providers.local import NO_GPU
from spotwarp_fs.api import LoadedSettings, SpotwarpError, check_workspace, settings_for, workspace_of

IMAGE: Final = "pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime"
"""Has Python 3.11 and CUDA; popular enough to lie on many hosts already."""
CANDIDATES_MAX: Final = 8
CRASHES_MAX: Final = 1000
RACE_BUDGET: Final = "--race-budget"


@dataclass(frozen=True, slots=True)
class Ordered:
    """Everything that was typed, checked."""

    spec: JobSpec
    loaded: LoadedSettings
    directory: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    image_login: ImageLogin | None = None
    checkpoint_gb: float | None = None
    checkpoint_every_s: float | None = None


def ordered(command_line: tuple[str, ...], given: Mapping[str, Any], cwd: Path) -> Ordered:
    """Read the options of *given*, by the names that `job_options` gives them."""
    directory = None if given["directory"] is None else (cwd / given["directory"]).absolute()
    if directory is not None and not directory.is_dir():
        raise BadWish(f"--from {given['directory']}: is no directory")
    interval = given["interval"]
    if interval is not None:
        parsing.seconds("--interval", interval, least_s=1.0)
    loaded = _settings(given)
    workspace = loaded.settings.workspace or workspace_of(loaded.settings, directory or cwd)
    job = given["job"] or parsing.job_of_workspace(workspace)
    providers = parsing.providers("--providers", given["providers"], plugged=plugged_names())
    factor, bid_usd_h = parsing.bid("--bid", given["bid"])
    spec = JobSpec(
        job=parsing.job_name("--job", job),
        workspace=workspace,
        command=command_line,
        providers=providers,
        wish=_wish(given, providers),
        image=given["image"] or ("" if all_local(providers) else IMAGE),
        candidates_max=_count("--candidates", given["candidates"], 1, CANDIDATES_MAX),
        bid_factor=factor,
        bid_usd_h=bid_usd_h,
        interval=interval or f"{loaded.settings.interval:g}s",
        form=given["mode"],
        checkpoint_path=_inside(given["checkpoint_path"]),
        limits=_limits(given),
    )
    every, size = given["checkpoint_every"], given["checkpoint_size"]
    env_file, login_file = given["env_file"], given["image_login"]
    return Ordered(
        spec=spec,
        loaded=loaded,
        directory=directory,
        environment={} if env_file is None else read_environment_file(cwd / env_file),
        image_login=None if login_file is None else read_image_login(cwd / login_file),
        checkpoint_gb=None if size is None else parsing.size_gb("--checkpoint-size", size),
        checkpoint_every_s=None if every is None else parsing.seconds("--checkpoint-every", every, least_s=1.0),
    )


def _settings(given: Mapping[str, Any]) -> LoadedSettings:
    try:
        workspace = None if given["workspace"] is None else check_workspace(given["workspace"])
    except SpotwarpError as error:
        raise BadWish(f"--workspace: {error}") from error
    return settings_for(store=given["store"], workspace=workspace)


def _wish(given: Mapping[str, Any], providers: tuple[str, ...]) -> Wish:
    def money(option: str, name: str) -> float | None:
        return None if given[name] is None else parsing.usd(option, given[name])

    def link(option: str, name: str) -> float:
        return 0.0 if given[name] is None else parsing.link_mbps(option, given[name])

    reliability = given["min_reliability"]
    return Wish(
        gpu=_gpu(given["gpu"], providers),
        gpu_count=parsing.gpus("--gpus", given["gpus"]),
        disk_gb=parsing.disk_gb("--disk", given["disk"]),
        max_price_usd_gpu_h=money("--max-price", "max_price"),
        on_demand_max_usd_gpu_h=money("--on-demand-max", "on_demand_max"),
        regions=() if given["region"] is None else parsing.names("--region", given["region"]),
        up_mbps_min=link("--min-up", "min_up"),
        down_mbps_min=link("--min-down", "min_down"),
        reliability_min=0.0 if reliability is None else parsing.share("--min-reliability", reliability),
    )


def _gpu(text: str | None, providers: tuple[str, ...]) -> GpuWish:
    if text is None:
        if not all_local(providers):
            raise BadWish("--gpu is missing: say which GPU the command needs, as in --gpu 'A100 80GB'")
        return parse_gpu(NO_GPU.name)  # this machine, with which no GPU is rented
    found = parse_gpu(text)
    if not found.words:
        raise BadWish(f"--gpu {text!r}: write a model, as in 'A100 80GB' or 'RTX 4090'")
    return found


def _limits(given: Mapping[str, Any]) -> Limits:
    budget, race, keep, below = (given[name] for name in ("budget", "race_budget", "keep_lost", "move_below"))
    return Limits(
        budget_usd=None if budget is None else parsing.usd("--budget", budget),
        race_budget_usd=None if race is None else parsing.usd(RACE_BUDGET, race),
        crashes_max=_count("--crashes", given["crashes"], 0, CRASHES_MAX),
        keep_lost_s=0.0 if keep is None else parsing.seconds("--keep-lost", keep),
        move_below=None if below is None else parsing.share("--move-below", below),
    )


def _count(option: str, count: int, least: int, most: int) -> int:
    if not least <= count <= most:
        raise BadWish(f"{option} {count}: write a number from {least} to {most}")
    return count


def _inside(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts:
        raise BadWish(f"--checkpoint-path {path}: write a directory in the workspace, without / in front and ..")
    return "/".join(parts)


def check_command(spec: JobSpec) -> None:
    """Raise BadWish for a command that says nothing."""
    if not spec.command or not spec.command[0].strip():
        raise BadWish("say what to keep running: `spotwarp failover … -- python train.py`")
    if any("\0" in word for word in spec.command):
        raise BadWish("the command holds a zero byte, which no argument can")
