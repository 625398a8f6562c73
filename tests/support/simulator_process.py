"""`python -m provisioner.simulator` as a process of its own, calm, for commands that are processes too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.simulated import CALM

KEYS = {"VAST_API_KEY": "vast-key-of-the-account", "RUNPOD_API_KEY": "runpod-key-of-the-account"}


@contextmanager
def simulator(base: Path, *, scale: float = 1.0, command: str = "", **settings: Any) -> Iterator[Mapping[str, str]]:
    """Start one, whose instances run the shell *command*, and give the variables that lead the commands to it."""
    scenario = {**CALM, **settings}
    options = [
        word for name, value in scenario.items() if name != "seed" for word in ("--set", f"{name}={json.dumps(value)}")
    ]
    if command:
        options += ["--exec", command]
    start = [sys.executable, "-m", "provisioner.simulator", "--seed", str(scenario["seed"]), "--dir", str(base)]
    with subprocess.Popen([*start, "--scale", f"{scale:g}", *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            yield {"VAST_URL": url, "RUNPOD_API_BASE_URL": url, **KEYS}
        finally:
            process.terminate()
