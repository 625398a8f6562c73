"""As much of the S3 protocol as the adapters speak, in memory, for servers that break its rules one at a time.

Subclasses of `TinyS3` change one rule: `faulty_s3.py` the network and the vendors, `gcs_server.py` Google.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


@dataclass
class Kept:
    body: bytes
    modified_s: float
    generation: int

    @property
    def etag(self) -> str:
        return hashlib.md5(self.body, usedforsecurity=False).hexdigest()


@dataclass
class World:
    """What one server keeps, shared by the threads that answer for it."""

    objects: dict[str, Kept] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    requests: list[str] = field(default_factory=list)
    modes: dict[str, float] = field(default_factory=dict)
    access_ids: list[str] = field(default_factory=list)
    generation: int = 0

    def asked(self, word: str) -> int:
        return sum(word in request for request in self.requests)

    def uses(self, mode: str) -> bool:
        """Say whether *mode* strikes now, and use up one of its turns; the first `<mode>_after` chances pass."""
        with self.lock:
            waiting, left = self.modes.get(f"{mode}_after", 0), self.modes.get(mode, 0)
            if left <= 0:
                return False
            self.modes[f"{mode}_after" if waiting > 0 else mode] = (waiting or left) - 1
            return waiting <= 0


class TinyS3(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one segment: two would wait for a delayed ACK
    disable_nagle_algorithm = True
    world: World

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        agreed = super().handle_expect_100()
        self.wfile.flush()
        return agreed

    def do_GET(self) -> None:
        self.handle_request()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        _, _bucket, *rest = unquote(parts.path).split("/", 2)
        key = rest[0] if rest else ""
        self.world.requests.append(f"{self.command} {key or '?' + parts.query}")
        signer = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        self.world.access_ids.append(signer[1] if signer else "")
        self.answer(key, query, body)

    def answer(self, key: str, query: dict[str, str], body: bytes) -> None:
        with self.world.lock:
            if not key:
                if self.command == "POST":
                    self.delete_many(body)
                else:
                    self.list(query)
            elif self.command == "PUT":
                self.put(key, body)
            elif self.command == "DELETE":
                self.world.objects.pop(key, None)
                self.send(204)
            else:
                self.read(key)

    def refused(self, key: str) -> bool:
        """Answer a conditional PUT that must not happen."""
        kept = self.world.objects.get(key)
        if_match = self.headers.get("If-Match", "").strip('"')
        if (self.headers.get("If-None-Match") and kept) or (if_match and (kept is None or kept.etag != if_match)):
            self.error(412, "PreconditionFailed")
            return True
        return False

    def put(self, key: str, body: bytes) -> None:
        if self.refused(key):
            return
        self.world.generation += 1
        self.world.objects[key] = kept = Kept(body, time.time(), self.world.generation)
        self.send(200, headers=self.about(kept))

    def about(self, kept: Kept) -> dict[str, str]:
        return {"ETag": f'"{kept.etag}"', "Last-Modified": formatdate(kept.modified_s, usegmt=True)}

    def read(self, key: str) -> None:
        kept = self.world.objects.get(key)
        if kept is None:
            return self.error(404, "NoSuchKey")
        headers, size = self.about(kept), len(kept.body)
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if self.command == "HEAD" or not asked:
            return self.send(200, kept.body, headers)
        first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
        if first >= size:
            return self.error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send(206, kept.body[first : last + 1], headers)

    def list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        found = [k for k in sorted(self.world.objects) if k.startswith(query.get("prefix", "")) and k > after]
        page = found[: int(query.get("max-keys", 1000))]
        more = len(found) > len(page)
        rows = "".join(self.row(key, self.world.objects[key]) for key in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        self.send(200, f"<ListBucketResult>{truncated}{token}{rows}</ListBucketResult>".encode())

    def row(self, key: str, kept: Kept) -> str:
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(kept.modified_s))
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
            f"<ETag>&quot;{kept.etag}&quot;</ETag><Size>{len(kept.body)}</Size></Contents>"
        )

    def delete_many(self, body: bytes) -> None:
        for key in re.findall(r"<Key>(.*?)</Key>", body.decode(), re.S):
            self.world.objects.pop(unescape(key), None)
        self.send(200, b"<DeleteResult></DeleteResult>")

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + self.world.modes.get("skew", 0), usegmt=True))
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str, message: str = "said the server") -> None:
        self.send(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
