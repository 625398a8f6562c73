"""Is the archive the same for the same sources, made once, and enough for a machine that has only a Python?"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from provisioner.bundling import bundle, wheels
from provisioner.bundling.archive import Member, digest, pack
from provisioner.bundling.bundle import make_bundle, make_light_bundle, upload_bundle
from provisioner.bundling.entry import NAME
from provisioner.core.bootstrap import Bootstrap, render
from provisioner.core.rendezvous import NodePhase
from tests.support.privileges import NOBODY
from tests.support.rented import JOB, Controlling, Rented, controlling
from tests.support.unprivileged import namespace, needs_namespace

TOOLS = ("sh", "mkdir", "tar", "gzip", "rm", "sleep", "cat", "sha256sum", "mv", "env", "id", "true")
"""All that a poor image has: no curl, no wget, no pip, no compiler."""


def test_an_archive_is_a_function_of_its_members_and_the_entry_comes_last() -> None:
    members = {"b/x": Member(b"1"), NAME: Member(b"print()"), "uv": Member(b"#!", executable=True), "a": Member(b"2")}
    body = pack(members, last=NAME)
    assert body == pack(dict(reversed(members.items())), last=NAME)
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert archive.getnames() == ["a", "b/x", "uv", NAME]
        assert [info.mode for info in archive] == [0o644, 0o644, 0o755, 0o644]
        assert {(info.mtime, info.uid, info.uname) for info in archive} == {(0, 0, "")}
    assert body != pack({**members, "a": Member(b"3")}, last=NAME)


def wheel(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, f"# {name}")


async def fake_download(place: Path) -> None:
    for version in wheels.VERSIONS:
        wheel(place / version / "pure-1-py3-none-any.whl", "pure/__init__.py")
        wheel(place / version / f"fast-1-cp{version.replace('.', '')}-manylinux.whl", f"fast/{version}.so")
        wheel(
            place / version / "botocore-1-py3-none-any.whl",
            "botocore/data/s3/service.json", "botocore/data/ec2/service.json", "botocore/data/endpoints.json",
        )  # fmt: skip
    wheel(place / "uv" / "uv-1-py3-none-manylinux.whl", "uv-1.data/scripts/uv", "uv/__init__.py")


async def test_it_is_made_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "download", fake_download)
    first = await make_bundle(tmp_path / "one")
    other = await make_bundle(tmp_path / "two")
    assert first.sha256 == other.sha256 == digest(first.path.read_bytes()), "another machine makes the same one"

    async def never(place: Path) -> None:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(wheels, "download", never)
    assert await make_bundle(tmp_path / "one") == first
    monkeypatch.setattr(wheels, "download", fake_download)
    monkeypatch.setattr(bundle, "_sources", lambda: iter([("spotwarp_fs/new.py", b"changed")]))
    assert (await make_bundle(tmp_path / "one")).sha256 != first.sha256


async def test_it_holds_what_each_python_needs_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "download", fake_download)
    made = await make_bundle(tmp_path)
    with tarfile.open(made.path) as archive:
        names = archive.getnames()
    assert {"site-3.11/fast/3.11.so", "site-3.12/fast/3.12.so", "site-3.13/fast/3.13.so"} <= set(names)
    assert {"site-common/pure/__init__.py", "site-common/spotwarp_fs/api.py", "uv"} <= set(names)
    assert {"site-common/provisioner/node/agent.py", "site-common/botocore/data/s3/service.json"} <= set(names)
    assert not [name for name in names if "/simulator/" in name or "/ec2/" in name or "__pycache__" in name]
    assert names[-1] == NAME


async def test_it_is_brought_to_the_store_once(tmp_path: Path) -> None:
    class Shelf:
        def __init__(self) -> None:
            self.put: list[str] = []

        async def has(self, key: str) -> bool:
            return key in self.put

        async def put_big(self, key: str, body: bytes) -> None:
            assert digest(body) in key
            self.put.append(key)

    shelf, made = Shelf(), make_light_bundle(tmp_path)
    await upload_bundle(shelf, made)
    await upload_bundle(shelf, make_light_bundle(tmp_path))
    assert shelf.put == [f"bundles/{made.sha256}.tgz"]


def unpack(path: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
    return target / NAME


def test_the_light_one_runs_with_this_interpreter_and_sees_no_variables_of_python(tmp_path: Path) -> None:
    entry = unpack(make_light_bundle(tmp_path).path, tmp_path / "unpacked")
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "trio.py").write_text("raise SystemExit('the image own trio')")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "trap"), "HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            [shutil.which("python3.11") or sys.executable, str(entry), "run", "--job", "x"],
            env=environment, capture_output=True, text=True, timeout=60, check=False, cwd="/",
        )  # fmt: skip
        assert "SPOTWARP_INTENT is not set" in done.stderr, done.stderr
        assert done.returncode == 1


def poor_path(tmp_path: Path, python: str) -> Path:
    """Make a directory of programs for PATH, and nothing else in it."""
    made = tmp_path / "bin"
    made.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (made / name).symlink_to(os.path.realpath(found) if name != "sh" else found)
    (made / "python3").symlink_to(python)
    return made


def pythons() -> list[str]:
    """The interpreters of this machine that an image might have, other than ours first."""
    found = []
    for version in ("3.12", "3.13", "3.11"):
        for base in (
            Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"),
            [Path(f"/usr/bin/python{version}")],
        ):
            found += [str(path) for path in base if path.exists()]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_namespace
async def test_the_real_one_runs_a_job_where_there_is_only_a_python(tmp_path: Path) -> None:
    made = await make_bundle(tmp_path / "bundles")
    assert made.path.stat().st_size < 128 << 20
    for path in (tmp_path, tmp_path.parent, tmp_path / "bundles"):
        path.chmod(0o755)
    program = "import sys, json; print(json.dumps([sys.version_info[:2], [p for p in sys.path if 'site-' in p]]))"
    async with controlling(tmp_path, ("python3", "-c", program)) as world:
        await upload_bundle(world.shelf, made)
        for python in pythons()[:2]:
            node = await poor(world, made.sha256, python, tmp_path / Path(python).name)
            await node.until(NodePhase.READY)
            await world.permit(node)
            ended = await node.until(NodePhase.ENDED, NodePhase.UNFIT)
            assert (ended.phase, ended.exit_code) == (NodePhase.ENDED, 0), ended
            assert ended.checks["form"] == "directory"
            version, paths = json.loads(next(x for x in (await node.log()).splitlines() if x.startswith("[[")))
            assert f"{version[0]}.{version[1]}" in python
            assert not [path for path in paths if str(tmp_path) in path], (
                "the command sees the image's Python as it was"
            )
        assert await world.epoch() == len(pythons()[:2])


async def poor(world: Controlling, sha256: str, python: str, home: Path) -> Rented:
    """Start the script as an ordinary user in a container that has a Python and a few tools."""
    home.mkdir()
    ident = f"00c0ffee-{len(world.rented) + 1}"
    script = render(replace(Bootstrap(ident, ("run", "--job", JOB), sha256, None)))
    store = Path(world.store.url.removeprefix("file://"))
    for path in [store, *store.rglob("*"), home]:
        os.chown(path, NOBODY, NOBODY)
    environment = {
        "PATH": str(poor_path(home, python)), "HOME": str(home), "TMPDIR": str(home),
        "SPOTWARP_BUNDLE_URL": await world.shelf.link(f"bundles/{sha256}.tgz", 600), **world.told.variables,
        "SPOTWARP_PLACE": str(home / "workspace"),
    }  # fmt: skip
    needed = sorted({home.parent, Path(os.path.realpath(python)).parents[1]})
    words = [*namespace(needed), str(home / "bin" / "env"), "-i"]
    words += [f"{name}={value}" for name, value in environment.items()]
    with (home / "node.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    node = PoorRented(world, ident, "", process=process, home_of=home)
    world.rented.append(node)
    return node


class PoorRented(Rented):
    """Not of the local provider: a container as a runtime would make it."""

    def __init__(
        self, world: Controlling, ident: str, instance_id: str, *, process: subprocess.Popen[bytes], home_of: Path
    ) -> None:
        super().__init__(world, ident, instance_id)
        self.process, self.home_of = process, home_of

    def story(self) -> str:
        return (self.home_of / "node.log").read_text(errors="replace")[-6000:]

    async def until(self, *phases: NodePhase) -> object:  # type: ignore[override]
        try:
            found = await super().until(*phases)
        except AssertionError:
            os.killpg(self.process.pid, 9)
            raise
        if found.phase in (NodePhase.ENDED, NodePhase.UNFIT):
            await trio.to_thread.run_sync(self.process.wait)
        return found
