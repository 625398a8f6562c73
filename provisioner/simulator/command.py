"""The command behind `python -m provisioner.simulator`: a market to play with.

Prints one line of JSON with its addresses, then serves until interrupted. Point the official clients at it:

    VAST_URL=http://127.0.0.1:PORT VAST_API_KEY=any vastai search offers 'gpu_name=RTX_4090' --type bid
    RUNPOD_API_BASE_URL=http://127.0.0.1:PORT python -c 'import runpod; …'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trio

from provisioner.simulator.clock import START_UNIX_S
from provisioner.simulator.latencies import SHIPPED, Latencies
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import EXEC_VARIABLE, simulating


def arguments() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m provisioner.simulator", description="Simulated Vast.ai and RunPod."
    )
    parser.add_argument("--seed", type=int, default=0, help="the world; one seed gives one market (default 0)")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: one that is free)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="virtual seconds per second; 0 freezes time (default 1)"
    )
    parser.add_argument(
        "--start", choices=("now", "fixed"), default="now", help="where virtual time begins (default now)"
    )
    parser.add_argument("--latencies", type=Path, default=SHIPPED, help="another table of latencies")
    parser.add_argument("--exec", dest="command", help=f"shell command of every instance (default: ${EXEC_VARIABLE})")
    parser.add_argument("--dir", type=Path, help="where instances have their disks (default: a temporary directory)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", dest="settings",
        help="a setting of the scenario, for example rivals_per_hour=0 or runpod_spot=true; may be repeated",
    )  # fmt: skip
    return parser


def scenario_of(options: argparse.Namespace) -> Scenario:
    """Return the scenario that the options describe, or raise ValueError."""
    known = {field.name for field in dataclasses.fields(Scenario)}
    start = datetime.now(UTC).timestamp() if options.start == "now" else START_UNIX_S  # noqa: DTZ (an edge)
    settings: dict[str, Any] = {"seed": options.seed, "start_unix_s": start}
    for setting in options.settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise ValueError(f"--set {setting}: no setting {name!r}; known are {', '.join(sorted(known))}")
        settings[name] = json.loads(value)
    return Scenario(**settings)


async def serve(options: argparse.Namespace, base: Path) -> None:
    """Serve until SIGINT or SIGTERM."""
    scenario = scenario_of(options)
    async with simulating(
        scenario, scale=options.scale, latencies=Latencies.load(options.latencies), port=options.port,
        nodes_dir=base, command=options.command,
    ) as simulator:  # fmt: skip
        print(json.dumps({**simulator.addresses(), "seed": scenario.seed}), flush=True)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                return


def main() -> None:
    """Run the command."""
    options = arguments().parse_args()
    try:
        if options.dir is not None:
            trio.run(serve, options, options.dir)
            return
        with tempfile.TemporaryDirectory(prefix="spotwarp-simulator-") as base:
            trio.run(serve, options, Path(base))
    except ValueError as error:
        sys.exit(f"simulator: {error}")
