"""The providers' own clients, run as their users run them: in an environment of their own, unmodified.

They bring some hundred packages, so they are not installed beside the project:

    python -m venv .venv-clients && .venv-clients/bin/pip install 'vastai==1.9.1' 'runpod==1.11.0'

CLIENTS_PYTHON names another environment's Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import trio

from tests.tidy.sources import ROOT

HOW = "python -m venv .venv-clients && .venv-clients/bin/pip install 'vastai==1.9.1' 'runpod==1.11.0'"


def clients_python() -> str | None:
    """Return a Python that can import both clients, or None."""
    for python in (os.environ.get("CLIENTS_PYTHON"), str(ROOT / ".venv-clients/bin/python"), sys.executable):
        if python and Path(python).exists():
            find = "import importlib.util as u, sys; sys.exit(not (u.find_spec('vastai') and u.find_spec('runpod')))"
            if subprocess.run([python, "-c", find], check=False, env=_outside(Path("/nonexistent"))).returncode == 0:
                return python
    return None


def _outside(home: Path) -> dict[str, str]:
    """Return an environment without this project in it, and a home of its own."""
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": str(home / "cache"), "COLUMNS": "200",
    }  # fmt: skip


class Clients:
    """Both clients, pointed at a simulator as providers.md 7.1 says."""

    def __init__(self, python: str, url: str, home: Path) -> None:
        self._python = python
        self._home = home
        self._environment = _outside(home) | {
            "VAST_URL": url, "VAST_API_KEY": "key-of-the-account", "VASTAI_NO_UPDATE_CHECK": "1",
            "RUNPOD_API_BASE_URL": url, "RUNPOD_API_KEY": "key-of-the-account",
        }  # fmt: skip

    async def vastai(self, *arguments: str, fails: bool = False) -> str:
        """Run the `vastai` command and return what it printed."""
        return await self._run(str(Path(self._python).with_name("vastai")), *arguments, fails=fails)

    async def vastai_json(self, *arguments: str) -> Any:
        return json.loads(await self.vastai(*arguments, "--raw"))

    async def program(self, source: str) -> Any:
        """Run a Python program with the clients importable; it prints one JSON value at its end."""
        return json.loads((await self._run(self._python, "-c", source)).splitlines()[-1])

    async def _run(self, *command: str, fails: bool = False) -> str:
        done = await trio.run_process(
            list(command), capture_stdout=True, capture_stderr=True, check=False, env=self._environment, cwd=self._home
        )
        text = done.stdout.decode() + (done.stderr.decode() if done.returncode or fails else "")
        assert (done.returncode != 0) <= fails, f"{command}\n{text}"
        return text
