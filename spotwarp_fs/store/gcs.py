"""Google Cloud Storage by its XML API and HMAC keys.

Invariant: what identifies a version is its generation, and every conditional PUT reaches Google as a condition on the
generation (`goog4.py` says why no other way is safe).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import botocore.session
from botocore.awsrequest import AWSPreparedRequest

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.store.goog4 import signed_headers
from spotwarp_fs.store.s3 import Response, S3Store
from spotwarp_fs.store.s3_clients import Clients
from spotwarp_fs.store.settings import StoreLocation, StoreSettings

ENDPOINT: Final = "https://storage.googleapis.com"
STAMP: Final = "%Y%m%dT%H%M%SZ"


class GcsStore(S3Store):
    """One prefix of one bucket; a key takes one write a second, and a faster writer gets Throttled."""

    def __init__(self, location: StoreLocation, settings: StoreSettings) -> None:
        super().__init__(location, settings)
        self._bulk_delete = False  # the XML API has none

    def _new_clients(self, location: StoreLocation, settings: StoreSettings) -> Clients:
        return _GoogleClients(settings, endpoint_url=location.endpoint_url or settings.endpoint_url or ENDPOINT)

    def _version(self, answer: Response) -> str:
        generation = answer["ResponseMetadata"]["HTTPHeaders"].get("x-goog-generation", "")
        if not generation.isdigit():
            raise Unavailable(f"{self.url}: an answer without x-goog-generation is no success")
        return str(generation)

    def _infos(self, page: Response) -> Iterator[ObjectInfo]:
        # The SDK drops the generation from listings, and an ETag must not be mistaken for one.
        return (replace(info, etag="") for info in super()._infos(page))


class _GoogleClients(Clients):
    def _create(self, session: botocore.session.Session, lane: Lane, *, on_aws: bool) -> Any:
        client = super()._create(session, lane, on_aws=False)

        def resign(request: AWSPreparedRequest, **_: object) -> None:
            found = session.get_credentials()
            assert found is not None, "the SDK signed before this"
            keys = found.get_frozen_credentials()
            digest = request.headers["x-amz-content-sha256"]
            digest = digest if isinstance(digest, str) else digest.decode()
            headers = {name: v if isinstance(v, str) else v.decode() for name, v in request.headers.items()}
            stamp = datetime.now(UTC).strftime(STAMP)
            again = signed_headers(
                request.method or "",
                request.url,
                headers,
                payload_sha256=digest,
                keys=(keys.access_key or "", keys.secret_key or ""),
                stamp=stamp,
            )
            for name in list(request.headers.keys()):
                del request.headers[name]
            for name, value in again.items():
                request.headers[name] = value

        client.meta.events.register("before-send.s3", resign)
        return client
