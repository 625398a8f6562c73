"""The pytest side of `scripts/seaweed.py`: one SeaweedFS for the session, a fresh bucket or prefix for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from spotwarp_fs.store.settings import StoreSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from seaweed import ACCESS_KEY, REGION, SECRET_KEY, Seaweed, seaweed

SHARED_BUCKET = "shared"


@dataclass
class S3Server:
    """A running server and names that no other test uses."""

    seaweed: Seaweed
    settings: StoreSettings = field(
        default_factory=lambda: StoreSettings(region=REGION, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY)
    )
    _serial: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment."""
        return self.seaweed.environment

    @property
    def url(self) -> str:
        """A store below a prefix of its own, in a bucket that all share: cheap."""
        return self.seaweed.url(SHARED_BUCKET, f"prefix-{next(self._serial)}")

    def fresh_bucket(self, prefix: str = "", *, name: str | None = None) -> str:
        """Make a bucket and return the URL of *prefix* in it."""
        bucket = name or f"bucket-{next(self._serial)}"
        self.seaweed.create_bucket(bucket)
        return self.seaweed.url(bucket, prefix)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with seaweed() as server:
        server.create_bucket(SHARED_BUCKET)
        yield S3Server(server)
