"""A provider that another package brings: one file and an entry point, with nothing of SpotWarp changed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from provisioner.cli.accounts import Here, is_here, make_providers, with_keys
from provisioner.cli.launching import _providers_variables, _self_destruct
from provisioner.cli.parsing import providers
from provisioner.cli.plugged import plugged, plugged_names
from provisioner.core.errors import BadWish
from provisioner.node.errand import PLUGGED_VARIABLES, read_errand
from provisioner.system import SystemClock, SystemEntropy
from tests.support.command_line import CommandLine

ADAPTER = """
from provisioner.core.bootstrap import SelfDestruct
from provisioner.providers.local import Local, LocalMachine
from provisioner.providers.plugin import Plugin

def make(place):
    variables = {"CORNER_KEY": "only-of-this-box"}
    machine = LocalMachine(environment=variables)
    return Local(place.state_dir, clock=place.clock, entropy=place.entropy, name="corner", machine=machine)

PLUGIN = Plugin(make, key_variable="CORNER_ACCOUNT", rents_this_machine=True)
DESTROY = SelfDestruct("https://corner.example/$CORNER_ID", "CORNER_KEY")
PAID = Plugin(make, instance_variable="CORNER_ID", destroy=DESTROY)
NONE = make
"""
POINTS = """[spotwarp.providers]
corner = cornershop:PLUGIN
paid = cornershop:PAID
wrong = cornershop:NONE
missing = nowhere:PLUGIN
vast = cornershop:PLUGIN
local-x = cornershop:PLUGIN
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path, as pip would leave it."""
    installed = tmp_path / "site"
    metadata = installed / "cornershop-1.0.dist-info"
    metadata.mkdir(parents=True)
    (installed / "cornershop.py").write_text(ADAPTER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cornershop\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "cornershop", raising=False)
    return installed


def test_its_name_can_be_typed_and_the_built_in_ones_keep_their_meaning(shelf: Path) -> None:
    assert plugged_names() == ("corner", "missing", "paid", "wrong")
    assert providers("--providers", "corner,vast", plugged=plugged_names()) == ("corner", "vast")
    with pytest.raises(BadWish, match="no provider is named 'cornr', did you mean corner"):
        providers("--providers", "cornr", plugged=plugged_names())
    assert plugged("vast") is None
    assert (is_here("corner"), is_here("paid"), is_here("vast"), is_here("local-x")) == (True, False, False, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"the provider missing \(nowhere:PLUGIN\) cannot be loaded \(ModuleNotFoundError"),
        ("wrong", r"the provider wrong \(cornershop:NONE\) is a function, and must be a Plugin"),
    ],
)
def test_one_that_cannot_be_loaded_is_named(shelf: Path, name: str, message: str) -> None:
    with pytest.raises(BadWish, match=message):
        plugged(name)


def test_the_collector_asks_it_where_its_accounts_key_is(shelf: Path, tmp_path: Path) -> None:
    (shelf / "cornershop-1.0.dist-info" / "entry_points.txt").write_text(POINTS.replace("wrong = cornershop:NONE", ""))
    (shelf / "nowhere.py").write_text("from cornershop import PAID as PLUGIN")

    def here(environ: dict[str, str]) -> Here:
        return Here(environ, tmp_path, tmp_path / "state", SystemClock(), SystemEntropy())

    assert with_keys(here({})) == ()
    assert with_keys(here({"CORNER_ACCOUNT": "key"})) == ("corner",)
    assert "key" not in repr(here({"CORNER_ACCOUNT": "key"}))
    (made,) = make_providers(["corner"], here({})).values()
    assert made.name == "corner"


def test_its_node_knows_its_own_id_and_keeps_its_key_to_itself(shelf: Path, tmp_path: Path) -> None:
    told = _providers_variables("paid")
    assert told == {PLUGGED_VARIABLES: "CORNER_ID,CORNER_KEY"}
    destroy = _self_destruct("paid")
    assert destroy is not None
    assert destroy.key == "CORNER_KEY"
    environ = {
        "SPOTWARP_INTENT": "00c0ffee-1", "SPOTWARP_ALIVE": str(tmp_path / "alive"), "CORNER_ID": "box-7",
        "CORNER_KEY": "only-of-this-box", **told,
    }  # fmt: skip
    errand = read_errand("job", environ)
    assert (errand.instance_id, errand.self_destruct) == ("box-7", "by the key in CORNER_KEY")
    assert "only-of-this-box" in errand.secrets
    assert not {"CORNER_KEY", PLUGGED_VARIABLES} & set(errand.run_environment)
    del environ["CORNER_ID"], environ["CORNER_KEY"]
    silent = read_errand("job", environ)
    assert silent.instance_id == ""
    assert silent.self_destruct.startswith("cannot: the container has none of CONTAINER_API_KEY, ")


@pytest.mark.timeout(180)
def test_a_job_runs_on_it_from_its_first_line_to_its_last(shelf: Path, tmp_path: Path) -> None:
    desk = CommandLine(tmp_path, f"file://{tmp_path / 'store'}", {"PYTHONPATH": os.pathsep.join(sys.path)})
    command = ["--providers", "corner", "--gpu", "CPU", "--job", "j", "--workspace", "j", "--mode", "directory"]
    done = desk.run(
        "failover", *command, "--yes", "--json", "--crashes", "0", "--", "sh", "-c", "echo done > out; exit 3"
    )
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert report["failovers"][0]["provider"] == "corner"
    assert report["orphans"] == []
    assert not list((tmp_path / ".spotwarp" / "providers" / "corner").glob("*/record.json")), "the node is gone"
