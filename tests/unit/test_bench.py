"""Does the bench measure what it says? Its parts that need no mount."""

from __future__ import annotations

import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spotwarp_fs.core import layout, manifests
from spotwarp_fs.core.changesets import ChangeSet, apply, concat, decode_records
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.packs import read_index
from spotwarp_fs.core.records import BLOCK_TABLE, FrameRef, InodeRecord
from spotwarp_fs.core.sections import parse_root
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.local.memory import MemoryKV
from tests.support.loopback import serving

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_chart import chart
from bench_link import link_to
from bench_streaming import _outside
from bench_synthetic import Maker, Shape

SMALL = Shape(small_files=30, data_files=5, checkpoints=3, shards=2, shard_blocks=3, later_states=4, files_per_state=2)


class _Bucket:
    """Takes what a client puts."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def client(self) -> _Bucket:
        return self

    def put_object(self, *, Bucket: str, Key: str, Body: bytes) -> None:
        self.objects[Key] = Body


class _Reader:
    """Reads a state as any node does, with the core's functions."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        identity = objects["at/workspaces/big/id"]
        root = "at/" + layout.workspace_root("big", layout.decode_identity("big", identity))
        self.objects = {key.removeprefix(root): body for key, body in objects.items()}
        numbered = {layout.manifest_number(key): body for key, body in self.objects.items()}
        self.bodies = [numbered[number] for number in sorted(number for number in numbered if number)]
        self.chain = [manifests.decode(body) for body in self.bodies]

    def frame(self, ref: FrameRef) -> bytes:
        stored = self.objects[layout.pack_key(ref.pack)]
        return open_frame(ref, stored[ref.offset : ref.offset + ref.stored_bytes])

    def records(self, ref: FrameRef) -> ChangeSet:
        root = parse_root(self.frame(ref))
        if not root.sections:
            return root.records
        return concat(decode_records(self.frame(section.frame)) for section in root.sections)

    def state(self) -> dict[bytes, bytes]:
        head = self.chain[-1]
        assert head.base is not None
        state: dict[bytes, bytes] = {}
        apply(state, self.records(head.base))
        for later in self.chain[head.base_number :]:
            assert later.changes is not None
            apply(state, self.records(later.changes))
        return state


def test_the_workspace_without_bytes_is_one_that_a_node_may_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALL_FRAMES", "WEIGHT_FRAMES"):
        monkeypatch.setattr(f"bench_synthetic.{name}", 3)
    bucket = _Bucket()
    made = Maker(bucket, "at", "big", SMALL).make()  # type: ignore[arg-type]
    reader = _Reader(bucket.objects)
    for at in range(1, len(reader.chain)):
        digest = manifests.digest_of(reader.bodies[at - 1])
        manifests.check_successor(reader.chain[at - 1], reader.chain[at], parent_digest=digest)
    head, state = reader.chain[-1], reader.state()
    kv = MemoryKV()
    with kv.write() as txn:
        for key, value in state.items():
            txn.put(key, value)
    with kv.read() as view:
        assert check(view, node_tables=False) == []
    inodes = [InodeRecord.decode(value) for key, value in state.items() if key[:1] == b"i"]
    files = [record for record in inodes if record.mode & 0o100000]
    assert (head.files, head.logical_bytes) == (len(files), sum(record.size for record in files))
    assert made.files == len(files) == 30 + 5 + 6 + 8
    refs = [FrameRef.decode(value) for key, value in state.items() if key[:1] == BLOCK_TABLE]
    assert made.distinct_digests == len({ref.digest for ref in refs})
    assert made.metadata_bytes == head.base_bytes + head.changes_bytes
    real = [ref for ref in refs if layout.pack_key(ref.pack) in reader.objects]
    assert len(real) == 30 + 8 + 6, "small files and the newest checkpoint can be read"
    for ref in real:
        assert len(reader.frame(ref)) == ref.raw_bytes
    for key, body in reader.objects.items():
        if pack := layout.pack_of(key):
            read_index(body, expected=pack)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"yes")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_link_delays_each_request_once_and_counts_what_passes() -> None:
    body = bytes(3_000_000)
    with serving(_Answers) as endpoint, link_to(endpoint, latency_s=0.1) as link:
        begun_s = time.perf_counter()
        for _ in range(2):
            request = urllib.request.Request(f"{link.endpoint}/key", data=body, method="PUT")
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.read() == b"yes"
        assert time.perf_counter() - begun_s >= 0.2
        assert link.requests == 2, "a body of many pieces is no further request"
        assert 2 * len(body) < link.up_bytes < 2 * len(body) + 2_000
        assert 6 < link.down_bytes < 2_000


def test_a_limited_link_carries_no_more_than_it_can() -> None:
    body = bytes(1_000_000)
    with serving(_Answers) as endpoint, link_to(endpoint, upload_bytes_per_s=2e6) as link:
        begun_s = time.perf_counter()
        request = urllib.request.Request(f"{link.endpoint}/key", data=body, method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        assert time.perf_counter() - begun_s >= 0.45


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (5, 0), (6, 0), (9, 1), (11, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, left_out: int) -> None:
    """Tables of the sign test at 5 %, two-sided."""
    assert _outside(count) == left_out


def test_the_chart_shows_each_ratio_once_and_is_well_formed() -> None:
    ratios = {"juicefs": {"chmod": 0.25, "a<b": 40.0}, "ext4": {"chmod": 0.1}, "rclone": {}, "passthrough": {}}
    results = [{"workload": key} for key in ("chmod", "a<b", "git_clone")]
    conditions = {"quick": False, "rounds": 3, "cores": 2}
    drawn = ElementTree.fromstring(chart({"results": results, "ratios": ratios, "conditions": conditions}))
    texts = ["".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("0.25") == 1
    assert texts.count("40.00") == 1
    assert "a<b" in texts
    assert "git_clone" not in texts, "nobody else has measured it"
    assert "0.10" not in texts, "ext4 is not drawn"
