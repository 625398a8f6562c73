"""The port, spoken to S3 and what calls itself compatible with it.

Invariant: a body is given only if it is as long as the server itself said the object (or range) is, and a write counts
only with a well-formed answer. What the SDK raises never leaves this module.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeVar

import trio
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from spotwarp_fs.core.errors import (
    Conflict,
    Denied,
    NotFound,
    PreconditionFailed,
    SpotwarpError,
    StoreRefused,
    Unavailable,
)
from spotwarp_fs.core.ports import Lane, ObjectInfo, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.keys import checked, range_stop, relative
from spotwarp_fs.store.limits import DELETE_BATCH_KEYS, LaneThreads, Throttled
from spotwarp_fs.store.s3_clients import Clients
from spotwarp_fs.store.s3_errors import date_of, translate
from spotwarp_fs.store.settings import StoreLocation, StoreSettings

CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
SDK_FAILURES: Final = (
    BotoCoreError,
    ClientError,
    HTTPError,
    http.client.HTTPException,
    OSError,
    ValueError,
    LookupError,
)
"""Besides its own errors the SDK lets those of its parsers and of urllib3 through when an answer is malformed."""

T = TypeVar("T")
Response = Mapping[str, Any]


class S3Store:
    """One prefix of one bucket."""

    def __init__(self, location: StoreLocation, settings: StoreSettings) -> None:
        self._bucket = location.place
        self._prefix = location.prefix
        self._page_keys = settings.list_page_keys
        self._clients = self._new_clients(location, settings)
        self._threads = LaneThreads()
        self._bulk_delete = True
        self.url = location.url

    def _new_clients(self, location: StoreLocation, settings: StoreSettings) -> Clients:
        return Clients(settings, endpoint_url=location.endpoint_url or settings.endpoint_url)

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        return await self._run(lane, f"GET {key}", lambda client: self._get(client, key, start, length))

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return await self._run(lane, f"HEAD {key}", lambda client: self._head(client, key))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return await self._run(lane, f"PUT {key}", lambda client: self._put(client, key, body))

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object, or raise PreconditionFailed."""
        doing = f"create-only PUT {key} (If-None-Match)"
        return await self._run(lane, doing, lambda client: self._put(client, key, body, IfNoneMatch="*"))

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*."""
        doing = f"PUT {key} (If-Match)"
        try:
            return await self._run(lane, doing, lambda client: self._put(client, key, body, IfMatch=f'"{etag}"'))
        except NotFound as error:
            raise PreconditionFailed(f"{doing}: the key is absent, not {etag}") from error

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give every object below *prefix*; a page that says more follows but not where ends in Unavailable."""
        where: dict[str, str] = {"StartAfter": self._prefix + after} if after else {}
        while True:
            page = await self._run(lane, f"LIST {prefix}", partial(self._page, prefix=prefix, where=where))
            for info in self._infos(page):
                yield info
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == where.get("ContinuationToken"):
                raise Unavailable(f"LIST {prefix} in {self.url}: the page is truncated, but names no next one")
            where = {"ContinuationToken": token}

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete in bulk, or one by one where the store refuses that."""
        for begin in range(0, len(keys), DELETE_BATCH_KEYS):
            batch = keys[begin : begin + DELETE_BATCH_KEYS]
            if self._bulk_delete and len(batch) > 1:
                try:
                    await self._run(lane, f"DELETE {len(batch)} objects", partial(self._delete, keys=batch))
                    continue
                except _BulkRefused:
                    self._bulk_delete = False
            await self._delete_each(batch, lane)

    async def link(self, key: ObjectKey, lives_s: int) -> str:
        """Return a URL that lets anyone GET the object for *lives_s*, or for as long as the keys it is signed with."""

        def sign(client: Any) -> str:
            where = {"Bucket": self._bucket, "Key": self._full(key)}
            return str(client.generate_presigned_url("get_object", Params=where, ExpiresIn=lives_s))

        return await self._run(Lane.CONTROL, f"sign a URL for {key}", sign)

    async def aclose(self) -> None:
        """Close idle connections; requests that a cancelled caller left behind end by their own timeouts."""
        self._clients.close()

    async def _run(self, lane: Lane, doing: str, call: Callable[[Any], T]) -> T:
        def guarded() -> T:
            client = None
            try:
                client = self._clients.client(lane)
                return call(client)
            except SDK_FAILURES as error:
                meant = translate(error, f"{doing} in {self.url}", now_s=time.time_ns() / 1e9)
                if isinstance(meant, Denied):
                    self._clients.refused(client)
                raise meant from error

        return await self._threads.run(lane, guarded)

    def _full(self, key: ObjectKey) -> str:
        return self._prefix + checked(key)

    def _get(self, client: Any, key: ObjectKey, start: int, length: int | None) -> Stored:
        # Always a range: its answer says how long the object is apart from how long this body is, so that a cut or
        # empty body under status 200 is noticed.
        assert start >= 0, f"no range: {start}, {length}"
        assert length is None or length > 0, f"no range: {start}, {length}"
        last = "" if length is None else str(start + length - 1)
        try:
            answer = client.get_object(Bucket=self._bucket, Key=self._full(key), Range=f"bytes={start}-{last}")
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416:
                return self._beyond(client, key, start, length)
            raise
        with closing(answer["Body"]) as stream:
            body = stream.read()
        begin, stop, size = self._announced(answer, len(body), key)
        wanted_stop = range_stop(key, size, start, length)
        if begin > start or stop < wanted_stop:
            raise Unavailable(f"GET {key} in {self.url}: asked for {start}-{last}, the store sent {begin}-{stop - 1}")
        if size == 0 and self._head(client, key).size_bytes != 0:
            raise Unavailable(f"GET {key} in {self.url}: an empty body for an object that is not empty")
        return Stored(body[start - begin : wanted_stop - begin], self._version(answer), self._server_time(answer))

    def _announced(self, answer: Response, got: int, key: ObjectKey) -> tuple[int, int, int]:
        """Return first byte, end and object size as the headers tell them, after holding the body against them."""
        length = int(answer["ContentLength"])
        begin, stop, size = 0, length, length
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
            told = CONTENT_RANGE.match(answer.get("ContentRange", ""))
            if told is None:
                raise Unavailable(f"GET {key} in {self.url}: a partial answer without a Content-Range")
            begin, stop, size = int(told[1]), int(told[2]) + 1, int(told[3])
        if not got == length == stop - begin:
            raise Unavailable(
                f"GET {key} in {self.url}: {got} bytes came, Content-Length says {length}, the range {stop - begin}"
            )
        return begin, stop, size

    def _beyond(self, client: Any, key: ObjectKey, start: int, length: int | None) -> Stored:
        """Answer for 416: right for an empty object, and Corrupt for any other that ends before *start*."""
        found = self._head(client, key)
        if found.size_bytes == 0 and start == 0:
            return Stored(b"", found.etag, found.server_time_s)
        range_stop(key, found.size_bytes, start, length)
        raise Unavailable(
            f"GET {key} in {self.url}: range at {start} refused, but the object has {found.size_bytes} bytes"
        )

    def _head(self, client: Any, key: ObjectKey) -> ObjectInfo:
        try:
            answer = client.head_object(Bucket=self._bucket, Key=self._full(key))
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                # A HEAD has no body to say whether key, bucket or path is missing; a GET has.
                client.get_object(Bucket=self._bucket, Key=self._full(key), Range="bytes=0-0")["Body"].close()
                raise Unavailable(f"HEAD {key} in {self.url}: 404, but a GET finds it") from error
            raise
        size, modified = int(answer["ContentLength"]), answer["LastModified"].timestamp()
        return ObjectInfo(key, size, modified, self._version(answer), self._server_time(answer))

    def _put(self, client: Any, key: ObjectKey, body: bytes, **condition: str) -> ObjectInfo:
        answer = client.put_object(Bucket=self._bucket, Key=self._full(key), Body=bytes(body), **condition)
        now_s = self._server_time(answer)
        return ObjectInfo(key, len(body), now_s, self._version(answer), now_s)

    def _page(self, client: Any, prefix: str, where: Mapping[str, str]) -> Response:
        page: Response = client.list_objects_v2(
            Bucket=self._bucket, Prefix=self._prefix + prefix, MaxKeys=self._page_keys, **where
        )
        if "IsTruncated" not in page:
            raise Unavailable(f"LIST {prefix} in {self.url}: the answer is not a listing")
        return page

    def _infos(self, page: Response) -> Iterator[ObjectInfo]:
        now_s = self._server_time(page)
        for found in page.get("Contents", ()):
            key, etag = relative(found["Key"], self._prefix), str(found.get("ETag", "")).strip('"')
            yield ObjectInfo(key, int(found["Size"]), found["LastModified"].timestamp(), etag, now_s)

    def _delete(self, client: Any, keys: list[ObjectKey]) -> None:
        what = {"Objects": [{"Key": self._full(key)} for key in keys], "Quiet": True}
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5, unique_id="spotwarp-md5")
        try:
            answer = client.delete_objects(Bucket=self._bucket, Delete=what)
        except ClientError as error:
            meant = translate(error, "DELETE", now_s=0)
            if _speaks_of_the_method(error, meant):
                raise _BulkRefused(str(meant)) from error
            raise
        failed = answer.get("Errors", [])
        if failed:
            first, count = failed[0], f"{len(failed)} of {len(keys)}"
            said = f"DELETE in {self.url}: {count} failed, first {first.get('Key')}: {first.get('Code')}"
            raise Denied(said) if first.get("Code") == "AccessDenied" else Unavailable(said)

    async def _delete_each(self, keys: list[ObjectKey], lane: Lane) -> None:
        failures: list[SpotwarpError] = []

        async def delete_one(key: ObjectKey) -> None:
            try:
                await self._run(
                    lane, f"DELETE {key}", lambda client: client.delete_object(Bucket=self._bucket, Key=self._full(key))
                )
            except NotFound:
                return
            except (StoreRefused, Unavailable) as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(delete_one, key)
        if failures:
            raise type(failures[0])(
                f"{len(failures)} of {len(keys)} deletes failed, first {failures[0]}"
            ) from failures[0]

    def _version(self, answer: Response) -> str:
        """Return what identifies this version of the object in a conditional write."""
        etag = str(answer.get("ETag", "")).strip('"')
        if not etag:
            raise Unavailable(f"{self.url}: an answer without an ETag is no success")
        return etag

    def _server_time(self, answer: Response) -> float:
        told = date_of(answer["ResponseMetadata"]["HTTPHeaders"])
        if told is None:
            raise Unavailable(f"{self.url}: an answer without a Date")
        return told


class _BulkRefused(StoreRefused):
    """The store does not take DeleteObjects as we send it."""


def _speaks_of_the_method(error: ClientError, meant: SpotwarpError) -> bool:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status in (400, 404, 405, 411, 501) and not isinstance(meant, Denied | Conflict | Throttled)


def _add_md5(params: dict[str, Any], **_: object) -> None:
    # Stores that predate other checksums insist on this one.
    body = params["body"]
    digest = hashlib.md5(body if isinstance(body, bytes) else body.encode(), usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
