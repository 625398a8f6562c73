"""Which S3 client a request uses: one per lane, signed with the newest credentials there are.

Invariant: a client is never used after its credentials were refused or its credentials file changed, so that
keys can be exchanged under a running mount. The SDK never retries by itself: a retried create would meet its own
first success.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import botocore.session
from botocore.awsrequest import AWSPreparedRequest
from botocore.config import Config
from botocore.loaders import Loader

from spotwarp_fs.core.ports import Lane
from spotwarp_fs.store.limits import (
    ASK_FIRST_BYTES,
    CONNECT_TIMEOUT_S,
    CREDENTIAL_REFRESH_S,
    LANE_THREADS,
    READ_TIMEOUT_S,
)
from spotwarp_fs.store.settings import StoreSettings

AWS_DOMAINS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
FALLBACK_REGION: Final = "us-east-1"
STAMPED_FILES: Final = ("credentials_file", "config_file")


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What the credentials files looked like when a session read them."""

    files: tuple[tuple[str, int, int, int], ...]


class Clients:
    """Clients of one endpoint, made when first needed; called from worker threads."""

    def __init__(self, settings: StoreSettings, *, endpoint_url: str | None) -> None:
        self._settings = settings
        self._endpoint_url = endpoint_url
        self._loader = Loader()  # parsing the service model is most of what a new client costs
        self._lock = threading.Lock()
        self._session: botocore.session.Session | None = None
        self._stamp = _Stamp(())
        self._made: dict[Lane, Any] = {}
        self._refused_at_s: float | None = None
        self._renewed_at_s = float("-inf")

    def client(self, lane: Lane) -> Any:
        """Return the lane's client; blocks while one is made."""
        with self._lock:
            session = self._current_session()
            if lane not in self._made:
                self._made[lane] = self._make(session, lane)
            return self._made[lane]

    def refused(self, client: Any) -> None:
        """Note that the store refused *client*'s credentials: look them up again before the next request."""
        with self._lock:
            if any(made is client for made in self._made.values()):
                self._refused_at_s = time.monotonic()

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for made in self._made.values():
                made.close()
            self._made.clear()
            self._session = None

    def _current_session(self) -> botocore.session.Session:
        now_s = time.monotonic()
        refused = self._refused_at_s is not None and now_s - self._renewed_at_s >= CREDENTIAL_REFRESH_S
        if self._session is None or refused or _stamp_of(self._session) != self._stamp:
            self._session = self._new_session()
            self._stamp = _stamp_of(self._session)
            # Requests on the old clients end on them; their pools go when the last one lets go.
            self._made = {}
            self._refused_at_s = None
            self._renewed_at_s = now_s
        return self._session

    def _new_session(self) -> botocore.session.Session:
        session = _session_of(self._settings)
        session.register_component("data_loader", self._loader)
        return session

    def _make(self, session: botocore.session.Session, lane: Lane) -> Any:
        if self._endpoint_url is None:
            client = self._create(session, lane, on_aws=True)
            if _is_aws(client.meta.endpoint_url):
                return client
            # AWS_ENDPOINT_URL or a profile leads elsewhere: the differences of other stores apply.
            client.close()
        return self._create(session, lane, on_aws=self._endpoint_url is not None and _is_aws(self._endpoint_url))

    def _create(self, session: botocore.session.Session, lane: Lane, *, on_aws: bool) -> Any:
        # Other stores refuse checksum trailers, and few have a host name per bucket.
        checksums: Literal["when_supported", "when_required"] = "when_supported" if on_aws else "when_required"
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=LANE_THREADS[lane],
            tcp_keepalive=True,
            signature_version="s3v4",
            s3={"addressing_style": "auto" if on_aws else "path"},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
        )
        region = self._settings.region or session.get_config_variable("region") or FALLBACK_REGION
        client = session.create_client("s3", region_name=region, endpoint_url=self._endpoint_url, config=config)
        client.meta.events.register("before-send.s3.PutObject", _send_small_bodies_at_once)
        return client


def find_credentials(settings: StoreSettings) -> dict[str, str | None] | None:
    """Return the keys that a request would be signed with now, and the region; None when there are none. Blocks."""
    session = _session_of(settings)
    found = session.get_credentials()
    if found is None:
        return None
    keys = found.get_frozen_credentials()
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "session_token": keys.token,
        "region": settings.region or session.get_config_variable("region"),
    }


def _session_of(settings: StoreSettings) -> botocore.session.Session:
    session = botocore.session.Session(profile=settings.profile)
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        session.set_credentials(settings.access_key_id, settings.secret_access_key, settings.session_token)
    return session


def _send_small_bodies_at_once(request: AWSPreparedRequest, **_: object) -> None:
    # Otherwise every manifest would wait one more round trip, or a second where the server ignores the question.
    if int(request.headers.get("Content-Length") or 0) < ASK_FIRST_BYTES and "Expect" in request.headers:
        del request.headers["Expect"]


def _is_aws(endpoint_url: str) -> bool:
    return (urlsplit(endpoint_url).hostname or "").endswith(AWS_DOMAINS)


def _stamp_of(session: botocore.session.Session) -> _Stamp:
    files = []
    for variable in STAMPED_FILES:
        path = os.path.expanduser(str(session.get_config_variable(variable)))
        try:
            found = os.stat(path)
        except OSError:
            continue
        files.append((path, found.st_mtime_ns, found.st_size, found.st_ino))
    return _Stamp(tuple(files))
