"""Does the rented container's script run what it was given, keep its secrets, and end itself when left alone?"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.core.bootstrap import (
    RUNPOD,
    SCRIPT_BYTES_MAX,
    VAST,
    Bootstrap,
    SelfDestruct,
    packed,
    render,
)
from provisioner.core.errors import BadWish

BOOT = Bootstrap("00c0ffee-1", ("run", "--", "true"), "a" * 64, VAST)
WAIT_S = 60
ODD = ["it's", '"', "$HOME", "`id`", "a b", "\n", "*", "\\", "", "-n", "é", "{x}", "%s", "; exit 3", "$(false)"]
NODE = """
import json, os, sys
from pathlib import Path
home = Path(os.environ["SPOTWARP_ALIVE"]).parent
seen = {"argv": sys.argv[1:], "intent": os.environ["SPOTWARP_INTENT"], "url": os.environ.get("SPOTWARP_BUNDLE_URL")}
(home / "seen.tmp").write_text(json.dumps(seen))
(home / "seen.tmp").rename(home / "seen.json")
sys.exit(int(os.environ.get("NODE_EXIT", "0")))
"""


def bundle(directory: Path, node: str = NODE) -> tuple[str, str]:
    """Make an archive as the controller does; give its URL and digest."""
    path = directory / "bundle-source.tgz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("node.py")
        info.size = len(node.encode())
        archive.addfile(info, io.BytesIO(node.encode()))
    return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()


class Calls(BaseHTTPRequestHandler):
    """A provider's API of one call, and a store of one archive."""

    seen: list[tuple[str, str, str | None]]
    files = Path("/nonexistent")

    def do_GET(self) -> None:
        type(self).seen.append(("GET", self.path, None))
        body = (Calls.files / self.path.strip("/").split("?")[0]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        type(self).seen.append(("DELETE", self.path, self.headers["Authorization"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


Provider = tuple[SelfDestruct, list[tuple[str, str, str | None]]]


@pytest.fixture
def provider() -> Iterator[Provider]:
    seen: list[tuple[str, str, str | None]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Api", (Calls,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield SelfDestruct(f"http://127.0.0.1:{server.server_port}/instances/$CONTAINER_ID/", "CONTAINER_API_KEY"), seen
    server.shutdown()
    thread.join()
    server.server_close()


def launched(script: str, home: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start the script as a provider does: a process group of its own, nothing else in the environment."""
    base = {"PATH": os.environ["PATH"], "SPOTWARP_HOME": str(home / "it's home"), "TMPDIR": str(home)}
    return subprocess.Popen(
        ["/bin/sh", "-c", script],
        env={**base, **environment},
        cwd=home,
        start_new_session=True,
        stderr=(home / "stderr").open("wb"),
    )


def stopped(process: subprocess.Popen[bytes]) -> None:
    """End everything the script has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"no {what} in {WAIT_S} s"
        time.sleep(0.05)


@given(st.lists(st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)))
@settings(max_examples=25, deadline=None)
def test_the_shell_reads_every_word_as_it_was_given(words: list[str]) -> None:
    script = render(replace(BOOT, run=("run", "--", *words), image_start=("/start.sh", *words)))
    line = next(part for part in script.split("\n") if part.startswith('"$P" "$W/bundle/node.py"'))
    start = script.index(line)
    call = script[start : script.index("&\nC=$!", start)].replace('"$P" "$W/bundle/node.py"', "printf '%s\\0'", 1)
    shown = subprocess.run(["/bin/sh", "-c", call], capture_output=True, check=True).stdout
    assert shown.decode().split("\0")[:-1] == ["run", "--", *words]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("call", [VAST, RUNPOD, None])
def test_shellcheck_has_nothing_to_say(call: SelfDestruct | None) -> None:
    script = render(replace(BOOT, destroy=call, image_start=("/start.sh", "x y")))
    found = subprocess.run(["shellcheck", "-s", "sh", "-"], input=script.encode(), capture_output=True, check=False)
    assert found.returncode == 0, found.stdout.decode()


@pytest.mark.parametrize("call", [VAST, RUNPOD, None])
def test_it_is_short_and_holds_nothing_but_names_of_secrets(call: SelfDestruct | None) -> None:
    script = render(replace(BOOT, destroy=call))
    assert len(script.encode()) <= SCRIPT_BYTES_MAX - 1000, "no room for the user's command"
    assert "Bearer " in script or call is None
    # A secret in an argument list is seen by every process of the host: both tools get theirs through stdin.
    assert "-H " not in script
    assert "curl -fsSL -m 300 -K - -o bundle.tgz" in script


def test_the_same_words_give_the_same_script() -> None:
    assert render(BOOT) == render(replace(BOOT))
    assert packed("x" * 5000) == packed("x" * 5000)


def test_a_long_command_travels_packed() -> None:
    script = render(replace(BOOT, run=("run", "--", "x" * 9000)))
    stub, environment = packed(script)
    assert len(stub) < 200
    assert gzip.decompress(base64.b64decode(environment["SPOTWARP_BOOT"])).decode() == script
    assert packed(render(BOOT)) == (render(BOOT), {})


def test_a_command_that_no_environment_holds_is_refused() -> None:
    noise = hashlib.shake_256(b"noise").hexdigest(40_000)
    with pytest.raises(BadWish, match="put it into a script"):
        packed(render(replace(BOOT, run=("run", "--", noise))))
    with pytest.raises(BadWish, match="NUL"):
        render(replace(BOOT, run=("run", "a\0b")))


def test_the_node_gets_its_command_and_its_exit_code_is_the_scripts(tmp_path: Path) -> None:
    url, digest = bundle(tmp_path)
    words = ("run", "--", *ODD)
    image = ("sh", "-c", "echo started")
    boot = replace(BOOT, run=words, bundle_sha256=digest, destroy=None, check_s=1, image_start=image)
    stub, environment = packed(render(boot), bytes_max=100)
    process = launched(stub, tmp_path, SPOTWARP_BUNDLE_URL=url, NODE_EXIT="7", **environment)
    assert process.wait(WAIT_S) == 7, (tmp_path / "stderr").read_text()
    home = tmp_path / "it's home"
    seen = json.loads((home / "seen.json").read_text())
    assert seen == {"argv": list(words), "intent": "00c0ffee-1", "url": None}
    assert (home / "image-start.log").read_text() == "started\n"
    assert home.stat().st_mode & 0o077 == 0
    stopped(process)


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_any_of_three_tools_fetches_and_none_shows_the_url(tmp_path: Path, tool: str, provider: Provider) -> None:
    _, digest = bundle(tmp_path)
    call, seen = provider
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "mkdir", "rm", "sleep", "tar", "gzip"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    if tool != "python3":
        real = shutil.which(tool)
        if real is None:
            pytest.skip(f"{tool} is not installed")
        (tools / tool).write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/args"\nexec {real} "$@"\n')
        (tools / tool).chmod(0o755)
    boot = replace(BOOT, bundle_sha256=digest, destroy=None, check_s=1)
    url = call.url.split("/instances")[0] + "/bundle-source.tgz?signature=s3cret"
    Calls.files = tmp_path
    process = launched(render(boot), tmp_path, SPOTWARP_BUNDLE_URL=url, PATH=str(tools))
    assert process.wait(WAIT_S) == 0, (tmp_path / "stderr").read_text()
    assert [(verb, path) for verb, path, _ in seen] == [("GET", "/bundle-source.tgz?signature=s3cret")]
    if tool != "python3":
        assert "s3cret" not in (tmp_path / "args").read_text()
    assert "s3cret" not in (tmp_path / "stderr").read_text()


def test_an_archive_of_other_bytes_is_never_run(tmp_path: Path, provider: Provider) -> None:
    call, seen = provider
    url, _ = bundle(tmp_path)
    boot = replace(BOOT, destroy=call, check_s=1)
    process = launched(render(boot), tmp_path, SPOTWARP_BUNDLE_URL=url, CONTAINER_ID="42", CONTAINER_API_KEY="k3y")
    until(lambda: seen, "destroy")
    assert seen[0] == ("DELETE", "/instances/42/", "Bearer k3y")
    assert not (tmp_path / "it's home" / "seen.json").exists()
    stopped(process)
    assert "k3y" not in (tmp_path / "stderr").read_text()


def test_a_fenced_node_destroys_itself(tmp_path: Path, provider: Provider) -> None:
    call, seen = provider
    url, digest = bundle(tmp_path)
    boot = replace(BOOT, destroy=call, bundle_sha256=digest, check_s=1)
    process = launched(
        render(boot),
        tmp_path,
        SPOTWARP_BUNDLE_URL=url,
        NODE_EXIT="12",
        CONTAINER_ID="42",
        CONTAINER_API_KEY="k3y",
    )
    until(lambda: seen, "destroy")
    assert "destroys itself: fenced" in (tmp_path / "stderr").read_text()
    stopped(process)


def test_nobody_alive_ends_the_rental_and_a_sign_of_life_delays_it(tmp_path: Path, provider: Provider) -> None:
    call, seen = provider
    node = """
import os, time
alive = os.environ["SPOTWARP_ALIVE"]
for _ in range(30):
    open(alive, "w").close()
    time.sleep(0.1)
open(alive + ".done", "w").close()
time.sleep(3600)
"""
    url, digest = bundle(tmp_path, node)
    boot = replace(BOOT, destroy=call, bundle_sha256=digest, boot_s=3600, silent_s=2, check_s=1)
    process = launched(render(boot), tmp_path, SPOTWARP_BUNDLE_URL=url, CONTAINER_ID="42", CONTAINER_API_KEY="k3y")
    until(lambda: seen, "destroy")
    assert (tmp_path / "it's home" / "alive.done").exists(), "it did not wait for the signs of life to stop"
    assert "nobody lives for" in (tmp_path / "stderr").read_text()
    stopped(process)


def test_sigterm_reaches_the_node_which_may_drain(tmp_path: Path) -> None:
    node = """
import os, signal, sys, time
from pathlib import Path
home = Path(os.environ["SPOTWARP_ALIVE"]).parent
def drain(*_):
    time.sleep(0.5)
    (home / "drained").touch()
    sys.exit(5)
signal.signal(signal.SIGTERM, drain)
(home / "up").touch()
time.sleep(3600)
"""
    url, digest = bundle(tmp_path, node)
    boot = replace(BOOT, destroy=None, bundle_sha256=digest, check_s=1)
    process = launched(render(boot), tmp_path, SPOTWARP_BUNDLE_URL=url)
    until((tmp_path / "it's home" / "up").exists, "node")
    process.terminate()
    assert process.wait(WAIT_S) == 5
    assert (tmp_path / "it's home" / "drained").exists()
    stopped(process)


@pytest.mark.parametrize("url", ["http://x/$(id)", "http://x/a b", 'http://x/"', "ftp://x"])
def test_a_call_that_the_shell_would_read_is_a_mistake_of_ours(url: str) -> None:
    with pytest.raises(AssertionError, match="shell would read"):
        SelfDestruct(url, "KEY")
