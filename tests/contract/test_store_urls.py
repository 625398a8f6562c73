"""Where a URL leads, and what is never shown of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spotwarp_fs.core.errors import UserError
from spotwarp_fs.store.urls import Scheme, StoreLocation, StoreSettings, open_store, parse_store_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://ws", StoreLocation(Scheme.S3, "ws")),
        ("s3://ws/", StoreLocation(Scheme.S3, "ws")),
        ("s3://ws/a/b/", StoreLocation(Scheme.S3, "ws", "a/b/")),
        ("s3://my.team.ws/runs/[gpu] a+b", StoreLocation(Scheme.S3, "my.team.ws", "runs/[gpu] a+b/")),
        ("s3://ws/100%20#x", StoreLocation(Scheme.S3, "ws", "100%20#x/")),
        ("s3://ws/what?is=this", StoreLocation(Scheme.S3, "ws", "what?is=this/")),
        ("s3://ws?endpoint=http://h:1", StoreLocation(Scheme.S3, "ws", "", "http://h:1")),
        ("s3://ws/p?endpoint=https://h&region=x", StoreLocation(Scheme.S3, "ws", "p/", "https://h", "x")),
        ("gs://b/p", StoreLocation(Scheme.GCS, "b", "p/")),
        ("file:///data/my store/", StoreLocation(Scheme.DIRECTORY, "/data/my store")),
    ],
)
def test_a_url_is_taken_apart_and_put_together(url: str, expected: StoreLocation) -> None:
    assert parse_store_url(url) == expected
    assert parse_store_url(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "ws/prefix", "http://ws", "s3:/ws", "s3://", "s3:///prefix", "file://relative", "", "s3://ws/a/../b", "s3://ws/a//b",
        "s3://ws?endpoint=h:1", "s3://ws?endpoint=ftp://h", "s3://ws?endpoint=http://k:s@h", "s3://ws?region=x&colour=red",
    ],
)  # fmt: skip
def test_a_wrong_url_is_refused_in_words(url: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_store_url(url)
    assert "k:s" not in str(caught.value)


@pytest.mark.promise("P-15")
def test_no_secret_is_shown() -> None:
    settings = StoreSettings(access_key_id="AKIDTEST", secret_access_key="hush", session_token="mum")
    store = open_store(parse_store_url("s3://ws/p?endpoint=http://127.0.0.1:1"), settings)
    for shown in (repr(settings), str(settings), repr(store), store.url):
        assert not any(secret in shown for secret in ("AKIDTEST", "hush", "mum"))


def test_a_directory_store_needs_no_sdk(tmp_path: object) -> None:
    code = (
        "import sys; from spotwarp_fs.store.urls import *; open_store(parse_store_url('file:///nowhere'));"
        "sys.exit(any(m.partition('.')[0] in ('boto3', 'botocore', 'urllib3') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
