"""Sign a request the way Google's XML API wants it: GOOG4-HMAC-SHA256, which is SigV4 under other names.

Invariant: the signed request carries no `x-amz-*` header. Google refuses a request with both families, and under an AWS
signature it ignores If-None-Match, so a create-only PUT can only be said with `x-goog-if-generation-match`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit

ALGORITHM: Final = "GOOG4-HMAC-SHA256"
DROPPED: Final = ("x-amz-", "amz-sdk-", "authorization", "if-none-match", "if-match", "expect")


def signed_headers(
    method: str, url: str, headers: Mapping[str, str], *, payload_sha256: str, keys: tuple[str, str], stamp: str
) -> dict[str, str]:
    """Return *headers* as Google should get them, with conditions translated and the signature added.

    *keys* are an HMAC access id and its secret; *stamp* is the time as `YYYYMMDDTHHMMSSZ`.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    kept = {name: value for name, value in lowered.items() if not name.startswith(DROPPED)}
    if lowered.get("if-none-match") == "*":
        kept["x-goog-if-generation-match"] = "0"
    elif "if-match" in lowered:
        kept["x-goog-if-generation-match"] = lowered["if-match"].strip('"')
    kept |= {"host": urlsplit(url).netloc, "x-goog-date": stamp, "x-goog-content-sha256": payload_sha256}

    access_id, secret = keys
    scope = f"{stamp[:8]}/auto/storage/goog4_request"
    signed = sorted(name for name in kept if name in ("host", "range", "content-md5") or name.startswith("x-goog-"))
    request = _canonical(method, url, {name: kept[name] for name in signed}, payload_sha256)
    text = "\n".join([ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    signature = hmac.new(_key(secret, scope), text.encode(), hashlib.sha256).hexdigest()
    kept["authorization"] = (
        f"{ALGORITHM} Credential={access_id}/{scope}, SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return kept


def _canonical(method: str, url: str, signed: Mapping[str, str], payload_sha256: str) -> str:
    parts = urlsplit(url)
    query = sorted(
        (quote(n, safe="-_.~"), quote(v, safe="-_.~")) for n, v in parse_qsl(parts.query, keep_blank_values=True)
    )
    lines = [method, parts.path or "/", "&".join(f"{name}={value}" for name, value in query)]
    lines += [f"{name}:{' '.join(value.split())}" for name, value in sorted(signed.items())]
    return "\n".join([*lines, "", ";".join(sorted(signed)), payload_sha256])


def _key(secret: str, scope: str) -> bytes:
    key = f"GOOG4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
