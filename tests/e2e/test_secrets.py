"""Does any secret get out: into a log, an argument list, a record, a status, an error, or an object in the store?"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import Fleet, Node, RefusedToMount, await_true
from tests.support.link import link_to
from tests.support.mounts import needs_fuse
from tests.support.s3_server import SECRET_KEY, S3Server
from tests.support.s3_server import s3_server as s3_server

pytestmark = [*needs_fuse, pytest.mark.promise("P-15")]

ENVIRONMENT = {
    "HF_TOKEN": "hf_NobodyMaySeeThisOne",
    "WANDB_API_KEY": "wandb-nobody-may-see-this-one",
    "SPOTWARP_GS_SECRET_ACCESS_KEY": "gs-secret-nobody-may-see",
}
REFUSED = {
    "AWS_ACCESS_KEY_ID": "AKIANOBODYKNOWSME0001",
    "AWS_SECRET_ACCESS_KEY": "refused/secret+nobody/may/see",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEJr-nobody-may-see",
}
SECRETS = [SECRET_KEY, *ENVIRONMENT.values(), *REFUSED.values()]


def assert_clean(where: str, shown: str | bytes) -> None:
    text = shown if isinstance(shown, bytes) else shown.encode()
    found = [secret for secret in SECRETS if secret.encode() in text]
    assert not found, f"{where} shows {found}"


def assert_files_clean(directory: Path, *, but: Path | None = None) -> int:
    """Look into every file of what a node keeps; returns how many there were."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink() and path != but]
    for path in files:
        assert_clean(str(path.relative_to(directory)), path.read_bytes())
    return len(files)


def config_of(node: Node, s3_server: S3Server) -> Path:
    """The account's keys in the configuration file of a node, as its owner writes them."""
    path = node.state / "config.yaml"
    keys = {"access_key_id": s3_server.settings.access_key_id, "secret_access_key": SECRET_KEY, "region": "us-east-1"}
    path.touch(mode=0o600)
    path.write_text(json.dumps({"s3": keys}))
    return path


@contextmanager
def fleet_on(tmp_path: Path, store: str, environment: dict[str, str]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, store, environment)
    try:
        yield fleet
    finally:
        fleet.close()


def everything_stored(s3_server: S3Server, store: str) -> Iterator[tuple[str, bytes]]:
    bucket, _, prefix = store.removeprefix("s3://").partition("?")[0].partition("/")
    client = s3_server.seaweed.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            yield item["Key"], client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()


def test_a_life_with_an_outage_shows_no_secret(tmp_path: Path, s3_server: S3Server) -> None:
    with link_to(s3_server.seaweed.endpoint) as link:
        url = s3_server.url
        store = url.replace(s3_server.seaweed.endpoint, link.endpoint)
        with fleet_on(tmp_path, store, ENVIRONMENT) as fleet:
            node = fleet.node()
            config = config_of(node, s3_server)
            node.start_supervised()
            assert_clean("the mount's answer", json.dumps(node.report))
            (node.root / "f").write_bytes(random.Random(1).randbytes(1 << 20))
            node.sync()
            for pid in (node.pid, node.supervisor_pid):
                assert_clean("an argument list", Path(f"/proc/{pid}/cmdline").read_bytes())
            link.cut()
            (node.root / "g").write_bytes(b"while the store is away")
            await_true(lambda: not node.status()["store_reachable"], "the outage is noticed")
            for command in (["status", "--json"], ["status"], ["config", "show"], ["config", "show", "--json"]):
                done = node.run(*command, *([str(node.root)] if command[0] == "status" else []))
                assert done.stdout
                assert_clean(" ".join(command), done.stdout + done.stderr)
            link.mend(s3_server.seaweed.endpoint)
            node.sync()
            done = node.run("umount", str(node.root), "--json")
            assert_clean("umount", done.stdout + done.stderr)
            assert "daemon.log" in {path.name for path in node.home.rglob("*.log")}
            assert assert_files_clean(node.home, but=config) > 3
        stored = list(everything_stored(s3_server, url))
        assert {"manifests", "packs"} <= {part for key, _ in stored for part in key.split("/")}
        for key, body in stored:
            assert_clean(key, key.encode() + body)


def test_refused_credentials_are_not_repeated(tmp_path: Path, s3_server: S3Server) -> None:
    """A key that the server does not know, and a secret that does not belong to its key."""
    with fleet_on(tmp_path / "unknown", s3_server.url, {**ENVIRONMENT, **REFUSED}) as fleet:
        done = fleet.node().run("ls", "work:/", "--store", fleet.store)
        assert done.returncode == ExitCode.STORE_DENIED
        assert_clean("ls", done.stdout + done.stderr)
    known = {**REFUSED, "AWS_ACCESS_KEY_ID": str(s3_server.settings.access_key_id)}
    with fleet_on(tmp_path / "wrong", s3_server.url, {**ENVIRONMENT, **known}) as fleet:
        node = fleet.node()
        with pytest.raises(RefusedToMount) as refused:
            node.start_supervised()
        assert refused.value.code == ExitCode.STORE_DENIED
        assert_clean("the refusal", str(refused.value))
        assert_files_clean(node.home)


def test_credentials_in_an_address_are_refused_unseen(tmp_path: Path) -> None:
    secret = REFUSED["AWS_SECRET_ACCESS_KEY"].replace("/", "_")
    for store in (f"s3://me:{secret}@bucket/prefix", f"s3://bucket/prefix?endpoint=http://me:{secret}@127.0.0.1:1"):
        with fleet_on(tmp_path, store, {}) as fleet:
            node = fleet.node()
            with pytest.raises(RefusedToMount) as refused:
                node.start_supervised()
            assert secret not in str(refused.value)
