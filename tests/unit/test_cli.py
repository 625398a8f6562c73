from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spotwarp_fs.cli import client, main, mounts, output
from spotwarp_fs.cli.options import Location, location
from spotwarp_fs.cli.status_view import rows
from spotwarp_fs.core.errors import Corrupt, ExitCode, Fenced, SpotwarpError, UserError
from spotwarp_fs.core.status import Hydration, InFlightItem, SafeCheckpoint, Status, Totals

BLOCKED = "import sys\nfor name in ('pyfuse3', 'lmdb'): sys.modules[name] = None\n"
RUN = BLOCKED + "from spotwarp_fs.cli.main import main\nmain()"
GROUPS = {
    "snapshot": ["create", "list", "delete"],
    "salvage": ["list", "copy", "drop"],
    "config": ["show", "check", "init", "schema"],
}
STATUS = Status(
    workspace="run7",
    store="s3://bucket/runs",
    form="fuse",
    mode="writer",
    head_number=42,
    head_age_s=3.0,
    writer_epoch=2,
    session="ab12",
    rpo_seconds=12.0,
    dirty_bytes=3 << 30,
    unpublished_bytes=4 << 30,
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SPOTWARP_")}
    return {**kept, "HOME": str(tmp_path), "COLUMNS": "100"}


@pytest.fixture(autouse=True)
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPOTWARP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def spotwarp(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "path",
    [[], *([name] for name in main.COMMANDS), *([group, name] for group, names in GROUPS.items() for name in names)],
    ids=lambda path: " ".join(path) or "spotwarp",
)
def test_help_works_without_fuse_and_without_lmdb(environment: dict[str, str], path: list[str]) -> None:
    shown = spotwarp(environment, *path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"Usage: {' '.join(['spotwarp', *path])} ")
    assert len(shown.stdout.splitlines()) > 5


def test_help_imports_nothing_heavy(environment: dict[str, str]) -> None:
    script = BLOCKED + (
        "from spotwarp_fs.cli.main import run\nrun(['--help'])\n"
        "heavy = {'pydantic', 'rich', 'yaml', 'trio', 'boto3', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_command_that_the_table_names_exists_and_has_its_short_help() -> None:
    context = main.cli.make_context("spotwarp", [], resilient_parsing=True)
    for name in main.COMMANDS:
        command = main.cli.get_command(context, name)  # type: ignore[attr-defined]
        assert command is not None
        assert command.name == name
        assert command.help


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], ExitCode.USAGE),
        (["mount"], ExitCode.USAGE),
        (["mount", "m", "--interval", "soon"], ExitCode.USAGE),
        (["mount", "m", "--store", "/data"], ExitCode.USAGE),
        (["status"], ExitCode.NOT_MOUNTED),
        (["sync", "/"], ExitCode.NOT_MOUNTED),
        (["umount", "/"], ExitCode.NOT_MOUNTED),
        (["snapshot", "list"], ExitCode.NOT_MOUNTED),
        (["gc"], ExitCode.NOT_MOUNTED),
        (["cat", "run7"], ExitCode.USAGE),
        (["cp", "a/b", "run7:x"], ExitCode.USAGE),
        (["push", "/", "Bad Name"], ExitCode.USAGE),
    ],
)
def test_errors_have_their_exit_code_and_with_json_are_one_document(
    arguments: list[str], code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == code
    plain = capsys.readouterr()
    assert plain.out == ""
    assert "error: " in plain.err
    if arguments[0] != "cat":
        assert main.run([*arguments, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["ok"] is False
        assert document["error"]["exit_code"] == code
        assert document["error"]["exit_name"] == code.name
        assert document["error"]["message"]


def test_a_broken_configuration_is_reported_and_keeps_nobody_from_unmounting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".spotwarp").mkdir()
    (tmp_path / ".spotwarp" / "config.yaml").write_text("intervall: 5s\n")
    assert main.run(["config", "check"]) == ExitCode.CONFIG
    assert main.run(["config", "show", "--json"]) == ExitCode.CONFIG
    assert main.run(["umount", "/x"]) == ExitCode.NOT_MOUNTED
    assert "did you mean interval?" in capsys.readouterr().err


def test_config_init_writes_a_private_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ".spotwarp" / "config.yaml"
    assert main.run(["config", "init", "--store", "s3://bucket/a: b"]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    assert main.run(["config", "init"]) == ExitCode.CONFIG
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]
    capsys.readouterr()
    assert main.run(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]["store"]
    assert shown["value"] == "s3://bucket/a: b"
    assert shown["source"] == "file"
    assert main.run(["config", "init", "--force"]) == 0


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (Fenced("gone"), 12),
        (ExceptionGroup("nursery", [ValueError("x"), ExceptionGroup("inner", [Corrupt("bad")])]), 11),
        (OSError(28, "No space left on device"), 1),
        (ZeroDivisionError("bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_error_edge(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(main.cli, "main", fail)
    assert main.run(["status", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["exit_code"] == code
    assert ("Traceback" in captured.err) is isinstance(raised, ZeroDivisionError)


def test_json_after_a_double_dash_belongs_to_the_other_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["nonsense", "--", "train", "--json"]) == ExitCode.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", ":x", "a/b:c", "run7:../x", "run7:a/../b"])
def test_places_that_are_not_in_a_workspace_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        location(text)


def test_places_in_a_workspace() -> None:
    assert location("run7") == Location("run7", "")
    assert location("run7:/a//b/./c:d/") == Location("run7", "a/b/c:d")


def test_names_that_could_drive_the_terminal_are_shown_escaped() -> None:
    assert output.printable("a\x1b[31mb\udcff\u202eé\n") == "a\\x1b[31mb\\xff\\u202eé\n"


class Daemon:
    """A real socket that answers each request with the lines it was given."""

    def __init__(self, path: Path, answers: Mapping[str, list[bytes]]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answers = answers
        self.requests: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as incoming:
                line = incoming.readline()
                if not line:
                    return
                request = json.loads(line)
                self.requests.append(request)
                for answer in self._answers[request["op"]]:
                    connection.sendall(answer)

    def stop(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as waker:
            waker.connect(str(path))
        self._thread.join()
        self._listener.close()


def line(**answer: Any) -> bytes:
    return json.dumps(answer).encode() + b"\n"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[mounts.MountRecord, Daemon]]:
    state = tmp_path / ".spotwarp"
    mountpoint = tmp_path / "work"
    mountpoint.mkdir()
    record = mounts.MountRecord(
        str(mountpoint), "run7", "s3://b", "/c", str(tmp_path / "s"), os.getpid(), os.getpid(), 0
    )
    mounts.write_record(state, record)
    published = line(ok=True, result={"manifest": 43})
    answers = {
        "sync": [line(progress={"done_bytes": 1, "total_bytes": 2}), published[:9], published[9:]],
        "status": [line(ok=True, result={**STATUS.to_dict(), "from_a_newer_daemon": 1})],
        "snapshot.create": [line(ok=False, error={"kind": "Fenced", "message": "taken over", "exit_code": 12})],
        "snapshot.list": [line(ok=True, result={"snapshots": [{"name": "a", "manifest": 7, "age_s": 60}]})],
        "snapshot.delete": [b"garbage\n"],
        "gc": [],
    }
    daemon = Daemon(tmp_path / "s", answers)
    yield record, daemon
    daemon.stop(tmp_path / "s")


Mounted = tuple[mounts.MountRecord, Daemon]


def test_sync_prints_the_manifest_number(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    record, daemon = mounted
    assert main.run(["sync"]) == 0
    assert capsys.readouterr().out == "43\n"
    assert main.run(["sync", record.mountpoint + "/sub/dir", "--json", "--timeout", "90s"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "manifest": 43}
    assert daemon.requests[-1] == {"op": "sync", "timeout_s": 90.0}


def test_status_is_shown_and_given_as_json(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rpo_seconds"] == 12.0
    assert document["head_number"] == 42
    assert main.run(["status"]) == 0
    text = capsys.readouterr().out
    assert "writes of the last 12 s, " in text
    assert "takes a time not known yet" in text


def test_the_daemons_error_keeps_its_kind_and_exit_code(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    record, _ = mounted
    with pytest.raises(Fenced, match="taken over"):
        client.call(record, "snapshot.create", {"name": "x"})
    assert main.run(["snapshot", "create", "x", "--json"]) == ExitCode.FENCED
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "Fenced"


def test_a_daemon_that_dies_or_babbles_is_an_error(mounted: Mounted) -> None:
    record, _ = mounted
    with pytest.raises(client.DaemonGone, match="ended before it answered 'gc'"):
        client.call(record, "gc")
    with pytest.raises(SpotwarpError, match="not a line of JSON"):
        client.call(record, "snapshot.delete")


def test_snapshots_are_listed(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["snapshot", "list"]) == 0
    assert capsys.readouterr().out == "a  manifest 7, 1 min old\n"


@pytest.mark.parametrize(("kind", "code"), [("Nonsense", 99), ("ExitCode", None), ("Refused", 1), ("UserError", 17)])
def test_a_strange_error_of_the_daemon_is_still_an_error(kind: str, code: int | None) -> None:
    error = client.remote_error({"kind": kind, "message": "m", "exit_code": code})
    assert str(error) == "m"
    assert error.exit_code == (17 if code == 17 else 1)


def test_a_dead_daemon_is_said_to_be_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    record = mounts.MountRecord("/m", "w", "s", "c", str(tmp_path / "none"), child.pid, child.pid, 0)
    with pytest.raises(client.DaemonGone, match="does not listen"):
        client.call(record, "status")
    mounts.write_record(tmp_path, record)
    assert mounts.read_records(tmp_path) == [record]
    assert mounts.current_records(tmp_path) == []


def test_mounts_are_found_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(path: Path) -> mounts.MountRecord:
        path.mkdir(parents=True)
        found = mounts.MountRecord(str(path), path.name, "s", "c", "x", os.getpid(), os.getpid(), 0)
        mounts.write_record(tmp_path, found)
        return found

    outer, inner, other = record(tmp_path / "a"), record(tmp_path / "a" / "in"), record(tmp_path / "ab")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert mounts.find_mount(tmp_path, tmp_path / "a" / "x") == outer
    assert mounts.find_mount(tmp_path, tmp_path / "a" / "in" / "x") == inner
    assert mounts.find_mount(tmp_path, tmp_path / "ab") == other
    assert mounts.find_mount(tmp_path, tmp_path / "link") == outer
    assert mounts.find_mount(tmp_path, tmp_path / "link" / "in") == inner
    monkeypatch.chdir(tmp_path / "ab")
    assert mounts.find_mount(tmp_path) == other
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"say which.*/a \(a\).*/ab \(ab\)") as caught:
        mounts.find_mount(tmp_path)
    assert caught.value.exit_code is ExitCode.NOT_MOUNTED
    mounts.remove_record(tmp_path, outer.mountpoint)
    mounts.remove_record(tmp_path, inner.mountpoint)
    assert mounts.find_mount(tmp_path) == other
    with pytest.raises(UserError, match="is not in a mounted workspace"):
        mounts.find_mount(tmp_path, tmp_path / "a")


def test_a_record_of_another_version_is_passed_over(tmp_path: Path) -> None:
    mounts.mounts_directory(tmp_path).mkdir()
    for name, text in {"a": "{", "b": "[]", "c": "{}"}.items():
        (mounts.mounts_directory(tmp_path) / f"{name}.json").write_text(text)
    assert mounts.read_records(tmp_path) == []


def test_status_survives_json_and_refuses_a_missing_field() -> None:
    full = Status(
        **{
            **STATUS.to_dict(),
            "newest_safe_checkpoint": SafeCheckpoint("checkpoint-9", 60.0, 41),
            "in_flight": (InFlightItem("a.pt", "file", True),),
            "hydration": Hydration("small", 5, 4, 3, 2),
            "notices": ("the map was damaged",),
            "totals": Totals(1, 2, 3, 4),
        }
    )
    assert Status.from_dict(json.loads(json.dumps(full.to_dict()))) == full
    with pytest.raises(KeyError, match="head_number"):
        Status.from_dict({key: value for key, value in full.to_dict().items() if key != "head_number"})


def shown(**changes: object) -> str:
    status = Status(**{**STATUS.to_dict(), "newest_safe_checkpoint": None, "totals": Totals(), **changes})
    return "\n".join(f"{label} {text}" for label, text, _ in rows(status))


def test_the_view_says_what_hurts() -> None:
    parts = [InFlightItem(f"checkpoint-9/{number}.pt", "file") for number in range(3)]
    others = [InFlightItem(f"{number}.pt", "file") for number in range(8)]
    text = shown(
        falling_behind=True,
        produced_bytes_per_s=1 << 30,
        sent_bytes_per_s=1 << 20,
        rpo_seconds=340.0,
        dirty_bytes=3 << 30,
        unpublished_bytes=4 << 30,
        drain_eta_seconds=3072.0,
        in_flight=(InFlightItem("checkpoint-9", "directory"), *parts, *others),
    )
    assert "falling behind: 1 GiB/s produced, 1 MiB/s sent" in text
    assert "writes of the last 5 min 40 s, 4 GiB, 3 GiB of it still to send" in text
    assert "drain takes 51 min" in text
    assert "the store has no complete one yet" in text
    assert "in flight checkpoint-9\n" in text
    assert "checkpoint-9/" not in text
    assert "and 4 more" in text
    assert "4.pt" not in text


def test_the_view_says_what_comes_from_the_store_and_what_was_lost() -> None:
    text = shown(
        hydration=Hydration("checkpoint", 4 << 30, 1 << 30, 40, 12), readers_waiting=3, notices=("the map was damaged",)
    )
    assert "fetching the newest checkpoint: 1 GiB of 4 GiB, 12 of 40 files" in text
    assert "reads 3 wait for the store" in text
    assert "NOTICE the map was damaged" in text
    ended = shown(hydration=Hydration("", 4 << 30, 1 << 30, 40, 12))
    assert "fetched 1 GiB of 4 GiB, 12 of 40 files; the rest comes when it is read" in ended
    assert "fetch" not in shown(hydration=Hydration("", 4, 4, 1, 1)).replace("0 B fetched", "")


def test_the_view_of_an_outage_promises_no_time() -> None:
    text = shown(store_reachable=False, store_error="503", rpo_seconds=9.0, dirty_bytes=1, drain_eta_seconds=1.0)
    assert "STORE not reachable: 503; publishing resumes by itself" in text
    assert "drain not before the store answers" in text


def test_the_view_of_a_fenced_mount_speaks_of_salvage_and_of_no_upload() -> None:
    text = shown(fenced=True, read_only=True, salvage="in the store", rpo_seconds=9.0, store_error="fenced: by 9")
    assert "FENCED" in text
    assert "salvage in the store" in text
    assert not any(label in text for label in ("at risk", "drain", "upload", "last error"))


def test_the_view_of_a_reader_is_of_what_it_reads() -> None:
    text = shown(mode="reader", read_only=True)
    assert "read-only, and does not change" in text
    assert not any(label in text for label in ("READ-ONLY", "at risk", "checkpoint", "upload", "written"))


def test_the_view_of_an_idle_mount_says_that_nothing_is_at_risk() -> None:
    text = shown(rpo_seconds=0.0, dirty_bytes=0, unpublished_bytes=0)
    assert "at risk nothing" in text
    assert "drain" not in text
