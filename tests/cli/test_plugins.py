"""Commands of other packages: found through an entry point, imported late, and harmless when they are broken."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from spotwarp_fs.cli import main, plugins
from tests.tidy.sources import ROOT

LIGHT = (
    "import sys\nfrom spotwarp_fs.cli.main import run\nrun({arguments})\nprint(*sorted(sys.modules), file=sys.stderr)"
)


def install(base: Path, name: str, table: str) -> None:
    """Lay a package with commands where Python finds it, as an installer would."""
    (base / f"{name}.py").write_text(table)
    (base / f"{name}_d-1.dist-info").mkdir()
    (base / f"{name}_d-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-d\nVersion: 1\n")
    points = f"[{plugins.GROUP}]\n{name} = {name}:COMMANDS\n"
    (base / f"{name}_d-1.dist-info" / "entry_points.txt").write_text(points)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]


def test_this_package_is_installed_with_its_commands() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][plugins.GROUP]
    installed = {point.name: point.value for point in entry_points(group=plugins.GROUP)}
    assert declared.items() <= installed.items(), "install the package again: pip install -e ."
    assert {"plan", "failover"} <= set(plugins.find_plugins().commands)


def test_a_plugins_command_runs_and_is_listed(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(path, "plug_good", "COMMANDS = {'wave': ('plug_wave', 'Wave.'), 'sneak': ('plug_wave', '')}")
    (path / "plug_wave.py").write_text("import click\n@click.command()\ndef command():\n    click.echo('hello')\n")
    assert main.run(["--help"]) == 0
    listed = capfd.readouterr().out
    assert "Wave." in listed
    assert "sneak" not in listed
    assert "plug_wave" not in sys.modules
    assert main.run(["wave"]) == 0
    assert capfd.readouterr().out == "hello\n"


def test_a_broken_package_harms_no_other_command(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(path, "plug_bad", "import plug_that_is_not_there")
    assert main.run(["--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "plug_bad (plug_bad:COMMANDS: ModuleNotFoundError" in shown
    assert main.run(["ls", "--help"]) == 0
    capfd.readouterr()
    assert main.run(["wave"]) == 1
    assert "no command 'wave' here" in capfd.readouterr().err


def test_a_broken_command_says_which(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(path, "plug_half", "COMMANDS = {'wave': ('plug_gone', 'Wave.')}")
    assert main.run(["wave"]) == 1
    assert "the command 'wave' of plug_gone cannot be loaded (ModuleNotFoundError" in capfd.readouterr().err


def test_an_unknown_command_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["wave"]) == 2
    assert "No such command 'wave'" in capfd.readouterr().err


def test_a_plugin_never_takes_our_name(path: Path) -> None:
    install(path, "plug_thief", "COMMANDS = {'ls': ('plug_ls', 'Steal.')}")
    assert main.run(["ls", "--help"]) == 0


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"]])
def test_help_loads_no_command(arguments: list[str]) -> None:
    code = LIGHT.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"trio", "httpx", "rich", "lmdb", "boto3", "provisioner.cli.plan", "provisioner.core"}
