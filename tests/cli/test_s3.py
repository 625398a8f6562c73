"""The same commands against a real S3 server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.urls import open_store, parse_store_url
from tests.support.command_line import CommandLine, build, mkdir, write
from tests.support.s3_server import S3Server, s3_server

__all__ = ["s3_server"]

DATA = os.urandom(6 << 20)


def test_a_workspace_is_read_and_written_through_s3(s3_server: S3Server, tmp_path: Path) -> None:
    url = s3_server.url
    spotwarp = CommandLine(tmp_path, url, s3_server.environment)

    async def one(session: Session) -> None:
        await mkdir(session, "runs")
        await write(session, "runs/model.pt", DATA)

    async def two(session: Session) -> None:
        await write(session, "log", b"step\n")

    before, after = build(open_store(parse_store_url(url), replace(s3_server.settings)), one, two)
    assert spotwarp.ok("ls", "-R", "test").split() == ["log", "runs", "runs/model.pt"]
    assert spotwarp.ok("ls", "test", "--at", str(before)).split() == ["runs"]
    done = spotwarp.run("cat", "test:runs/model.pt", text=False)
    assert done.stdout == DATA
    spotwarp.ok("cp", "-r", "test:", str(tmp_path / "out"))
    assert (tmp_path / "out" / "runs" / "model.pt").read_bytes() == DATA
    (tmp_path / "out" / "log").write_text("step 2\n")
    report = json.loads(spotwarp.ok("push", str(tmp_path / "out"), "test", "--json"))
    assert report["manifest"] == after + 2
    assert report["bytes_sent"] < 10_000
    assert spotwarp.ok("cat", "test:log") == "step 2\n"
    checks = json.loads(spotwarp.ok("doctor", "--quick", "--json"))["checks"]
    assert {check["name"]: check["outcome"] for check in checks}["conditional writes"] == "ok"


def test_a_missing_bucket_and_refused_keys_are_told_apart(s3_server: S3Server, tmp_path: Path) -> None:
    missing = CommandLine(tmp_path, s3_server.seaweed.url("no-such-bucket", "runs"), s3_server.environment)
    assert "bucket" in missing.here("ls", "run7", code=ExitCode.CONFIG)
    checks = json.loads(missing.here("doctor", "--quick", "--json", code=ExitCode.CONFIG))["checks"]
    assert "create the bucket" in checks[-1]["remedy"]
    wrong = {**s3_server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    refused = CommandLine(tmp_path, s3_server.url, wrong)
    checks = json.loads(refused.here("doctor", "--quick", "--json", code=ExitCode.STORE_DENIED))["checks"]
    assert "keys" in checks[-1]["remedy"]
