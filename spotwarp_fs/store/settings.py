"""What a user may say about a store: where it is, and how to get in.

Invariant: a secret is never part of a `repr`, a URL or a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spotwarp_fs.store.limits import LIST_PAGE_KEYS


class Scheme(Enum):
    """The kinds of store."""

    S3 = "s3"
    GCS = "gs"
    DIRECTORY = "file"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store's URL, taken apart."""

    scheme: Scheme
    place: str
    """The bucket, or the directory's absolute path."""
    prefix: str = ""
    """Empty, or ending in a slash."""
    endpoint_url: str | None = None
    region: str | None = None

    @property
    def url(self) -> str:
        """The URL again, in one spelling."""
        if self.scheme in (Scheme.DIRECTORY, Scheme.MEMORY):
            return f"{self.scheme.value}://{self.place}"
        options = [f"endpoint={self.endpoint_url}"] if self.endpoint_url else []
        options += [f"region={self.region}"] if self.region else []
        path = f"{self.scheme.value}://{self.place}/{self.prefix}".rstrip("/")
        return path + ("?" + "&".join(options) if options else "")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to reach and enter a store.

    What is None is found by the SDK's own chain: environment, files, instance role.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    list_page_keys: int = LIST_PAGE_KEYS
    """Keys per listing page; the probe asks for small pages to see them continued."""
