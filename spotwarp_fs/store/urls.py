"""What a store's URL means, and the adapter behind it.

Invariant: a URL's path is taken literally (no percent decoding), so any bucket key prefix can be written; options come
after the last `?` and only known ones are taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.store.keys import prefix_of
from spotwarp_fs.store.settings import Scheme, StoreLocation, StoreSettings

__all__ = ["Scheme", "StoreLocation", "StoreSettings", "open_store", "parse_store_url"]

OPTIONS: Final = frozenset({"endpoint", "region"})
FORMS: Final = "s3://bucket/prefix, gs://bucket/prefix or file:///path"


def parse_store_url(url: str) -> StoreLocation:
    """Take *url* apart, or raise UserError.

    >>> parse_store_url("s3://ws/runs/[gpu] a+b?endpoint=http://127.0.0.1:8333").prefix
    'runs/[gpu] a+b/'
    """
    name, separator, rest = url.partition("://")
    try:
        scheme = Scheme(name)
    except ValueError:
        scheme = None
    if not separator or scheme is None:
        raise UserError(f"store {url!r} is none of {FORMS}", ExitCode.CONFIG)
    if scheme is Scheme.DIRECTORY:
        return _directory(url, rest)
    rest, options = _options(url, rest)
    place, _, prefix = rest.partition("/")
    if not place:
        raise UserError(f"store {url!r} names no bucket; write {FORMS}", ExitCode.CONFIG)
    endpoint = options.get("endpoint")
    return StoreLocation(scheme, place, prefix_of(prefix), _endpoint(endpoint), options.get("region"))


def open_store(location: StoreLocation, settings: StoreSettings | None = None) -> ObjectStore:
    """Make the adapter for *location*; nothing is sent yet.

    The SDK is imported only for stores that need it: that is most of a command's start-up time.
    """
    chosen = settings or StoreSettings()
    match location.scheme:
        case Scheme.S3:
            from spotwarp_fs.store.s3 import S3Store

            return S3Store(location, chosen)
        case Scheme.GCS:
            from spotwarp_fs.store.gcs import GcsStore

            return GcsStore(location, chosen)
        case Scheme.DIRECTORY:
            from spotwarp_fs.store.directory import DirectoryStore

            return DirectoryStore(Path(location.place))
        case Scheme.MEMORY:
            from spotwarp_fs.store.memory import MemoryStore

            return MemoryStore(name=location.place)


def _directory(url: str, rest: str) -> StoreLocation:
    if not rest.startswith("/"):
        raise UserError(f"store {url!r} needs an absolute path: file:///path", ExitCode.CONFIG)
    return StoreLocation(Scheme.DIRECTORY, str(Path(rest)))


def _options(url: str, rest: str) -> tuple[str, dict[str, str]]:
    """Split known options off; a `?` that begins none belongs to the prefix."""
    path, _, query = rest.rpartition("?")
    pairs = [pair.partition("=") for pair in query.split("&")]
    if not path or not any(name in OPTIONS for name, _, _ in pairs):
        return rest, {}
    unknown = [name for name, _, _ in pairs if name not in OPTIONS]
    if unknown:
        raise UserError(f"store {url!r} has unknown option {unknown[0]!r}; known: {sorted(OPTIONS)}", ExitCode.CONFIG)
    return path, {name: value for name, _, value in pairs}


def _endpoint(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"endpoint {endpoint!r} is not http://host[:port] or https://host", ExitCode.CONFIG)
    if parts.username or parts.password:
        raise UserError("an endpoint must not contain credentials: use the environment or a profile", ExitCode.CONFIG)
    return endpoint
