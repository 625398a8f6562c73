"""Google's rules on loopback: the XML API with HMAC keys, where it differs from S3.

- If-None-Match and If-Match are ignored on PUT; `x-goog-if-generation-match` is honoured, and must be signed.
- A request with both `x-amz-*` and `x-goog-*` headers is refused; an unsigned or wrongly signed one too.
- No DeleteObjects; one write per second and key, then 429.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from tests.support.loopback import serving
from tests.support.tiny_s3 import Kept, TinyS3, World

ACCESS_ID = "GOOGTESTS"
SECRET = "not-a-secret"


@dataclass
class GoogleWorld(World):
    key_interval_s: float = 1.0
    written_at_s: dict[str, float] = field(default_factory=dict)


class TinyGoogle(TinyS3):
    world: GoogleWorld

    def answer(self, key: str, query: dict[str, str], body: bytes) -> None:
        names = [name.lower() for name in self.headers]
        if any(n.startswith("x-amz-") for n in names) and any(n.startswith("x-goog-") for n in names):
            return self.error(400, "ExcessHeaderValues", "Requests cannot specify both x-amz and x-goog headers")
        if not self.signed(body):
            return self.error(403, "SignatureDoesNotMatch")
        if self.command == "POST":
            return self.error(400, "InvalidArgument", "no DeleteObjects here")
        super().answer(key, query, body)

    def refused(self, key: str) -> bool:
        kept = self.world.objects.get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (kept.generation if kept else 0):
            self.error(412, "PreconditionFailed")
            return True
        now_s = time.monotonic()
        if now_s - self.world.written_at_s.get(key, float("-inf")) < self.world.key_interval_s:
            self.error(429, "SlowDown", "The rate of change requests to the object exceeds the rate limit.")
            return True
        self.world.written_at_s[key] = now_s
        return False

    def about(self, kept: Kept) -> dict[str, str]:
        return super().about(kept) | {"x-goog-generation": str(kept.generation)}

    def signed(self, body: bytes) -> bool:
        """Check the signature from Google's description of V4, apart from the code that makes it."""
        scheme, _, rest = self.headers.get("Authorization", "").partition(" ")
        told = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
        if scheme != "GOOG4-HMAC-SHA256" or not told.get("Credential", "").startswith(f"{ACCESS_ID}/"):
            return False
        names = told["SignedHeaders"].split(";")
        extensions = {name.lower() for name in self.headers if name.lower().startswith("x-goog-")}
        digest = self.headers["x-goog-content-sha256"]
        if not extensions | {"host"} <= set(names) or digest != hashlib.sha256(body).hexdigest():
            return False
        parts = urlsplit(self.path)
        pairs = sorted(pair.partition("=")[::2] for pair in parts.query.split("&")) if parts.query else []
        query = "&".join(f"{quote(unquote(n), safe='')}={quote(unquote(v), safe='')}" for n, v in pairs)
        headers = [f"{name}:{self.headers[name].strip()}" for name in names]
        canonical = "\n".join([self.command, parts.path, query, *headers, "", ";".join(names), digest])
        scope = told["Credential"].split("/", 1)[1]
        text = "\n".join([scheme, self.headers["x-goog-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()])
        key = b"GOOG4" + SECRET.encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return hmac.compare_digest(told["Signature"], hmac.new(key, text.encode(), hashlib.sha256).hexdigest())


@contextmanager
def gcs_server(*, key_interval_s: float = 1.0) -> Iterator[tuple[str, GoogleWorld]]:
    """Serve until the block ends; give the endpoint and what the server keeps."""
    world = GoogleWorld(key_interval_s=key_interval_s)
    with serving(type("Handler", (TinyGoogle,), {"world": world})) as endpoint:
        yield endpoint, world
