"""An S3 server with the faults that users of real ones report, each switched on by name and for a number of turns.

slow_down · html_502 · html_404 · down · expired · denied · skewed · unknown_bucket · conflict · no_conditions ·
ignore_conditions · lost_put · no_token · no_bulk · wants_md5 · empty_body · short_body · flipped_byte · no_etag ·
ignore_range · delete_errors
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.loopback import serving
from tests.support.tiny_s3 import Kept, TinyS3, World

ALWAYS = float("inf")

REFUSALS = {
    "slow_down": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "unknown_bucket": (404, "NoSuchBucket"),
}


class FaultyS3(TinyS3):
    def answer(self, key: str, query: dict[str, str], body: bytes) -> None:
        world = self.world
        if world.uses("down"):
            return self.hang_up()
        for mode, (status, code) in REFUSALS.items():
            if world.uses(mode):
                return self.error(status, code)
        for mode, status in (("html_502", 502), ("html_404", 404)):
            if world.uses(mode):
                return self.send(status, b"<html><body>nginx", {"Content-Type": "text/html"})
        if world.access_ids[-1] in world.modes:
            return self.error(403, "InvalidAccessKeyId")
        super().answer(key, query, body)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def refused(self, key: str) -> bool:
        if not (self.headers.get("If-None-Match") or self.headers.get("If-Match")):
            return False
        if self.world.uses("conflict"):
            self.error(409, "ConditionalRequestConflict")
            return True
        if self.world.uses("no_conditions"):
            self.error(501, "NotImplemented")
            return True
        return not self.world.uses("ignore_conditions") and super().refused(key)

    def put(self, key: str, body: bytes) -> None:
        if self.world.uses("lost_put"):
            self.send, keep = lambda *_, **__: None, self.send  # type: ignore[method-assign]
            super().put(key, body)
            self.send = keep  # type: ignore[method-assign]
            return self.hang_up()
        super().put(key, body)

    def about(self, kept: Kept) -> dict[str, str]:
        found = super().about(kept)
        if self.command == "PUT" and self.world.uses("no_etag"):
            del found["ETag"]
        return found

    def read(self, key: str) -> None:
        if self.world.uses("ignore_range"):
            del self.headers["Range"]
        super().read(key)

    def delete_many(self, body: bytes) -> None:
        if self.world.uses("no_bulk") or (self.world.uses("wants_md5") and not self.headers.get("Content-MD5")):
            return self.error(400, "MissingContentMD5")
        if self.world.uses("delete_errors"):
            key = re.findall(r"<Key>(.*?)</Key>", body.decode())[0]
            why = f"<Error><Key>{key}</Key><Code>InternalError</Code></Error>"
            return self.send(200, f"<DeleteResult>{why}</DeleteResult>".encode())
        super().delete_many(body)

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        headers = dict(headers or {})
        if self.command == "GET" and status in (200, 206) and "ETag" in headers and body:
            body, headers = self.damaged(body, headers)
        if b"NextContinuationToken" in body and self.world.uses("no_token"):
            body = re.sub(rb"<NextContinuationToken>.*?</NextContinuationToken>", b"", body)
        super().send(status, body, headers)

    def damaged(self, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        if self.world.uses("empty_body"):
            return b"", headers
        if self.world.uses("short_body"):
            self.close_connection = True
            return body[: len(body) // 2], headers | {"Content-Length": str(len(body))}
        if self.world.uses("flipped_byte"):
            return bytes([body[0] ^ 1]) + body[1:], headers
        return body, headers


@contextmanager
def faulty_s3() -> Iterator[tuple[str, World]]:
    """Serve until the block ends; give the endpoint and what the server keeps."""
    world = World()
    with serving(type("Handler", (FaultyS3,), {"world": world})) as endpoint:
        yield endpoint, world
