"""Every setting that a person may set, its default, its limits and what it is for.

One model; `sources.py` fills it from the file, the environment and flags. Invariant: a secret is a SecretStr from the
moment it is validated, so that no rendering, error or JSON shows it; and every default is written here only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.policies import ATOMIC_DIRECTORIES, ATOMIC_FILES, SCRATCH, NameGlobs, PathGlobs, Policies
from spotwarp_fs.core.units import (
    DURATION_HELP,
    SIZE_HELP,
    exact_duration,
    exact_size,
    parse_duration,
    parse_size,
)

MiB: Final = 1 << 20
GiB: Final = 1 << 30
MINUTE_S: Final = 60.0
_WORKSPACE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def _readable(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turn a UserError into the ValueError that pydantic collects."""

    def parsed(value: Any) -> Any:
        try:
            return parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None

    return parsed


def _absolute_path(value: Any) -> Path:
    path = os.path.expanduser(str(value))
    if not os.path.isabs(path):
        raise ValueError(f"{str(value)!r} is not an absolute path; write it from / or from ~")
    return Path(os.path.normpath(path))


def check_workspace(name: str) -> str:
    """Return *name* if it can name a workspace in every store, or raise UserError."""
    if not _WORKSPACE.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a workspace; use up to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        )
    return name


def check_store(url: str) -> str:
    """Return *url* with `~` expanded if it names a store, or raise UserError; credentials in it are refused unseen."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UserError("the store's URL holds credentials; put them into s3.access_key_id and s3.secret_access_key")
    if parts.scheme in ("s3", "gs") and parts.netloc:
        return url.rstrip("/")
    if parts.scheme == "file" and parts.netloc in ("", "~"):
        path = os.path.expanduser(parts.netloc + parts.path)
        if path.strip("/"):
            return f"file://{os.path.normpath(path)}"
    hint = f"; did you mean file://{os.path.abspath(url)}?" if not parts.scheme else ""
    raise UserError(f"{url!r} is not a store; write file:///DIRECTORY, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX{hint}")


def check_endpoint(url: str) -> str:
    """Return *url* if it is a plain http(s) address, or raise UserError; credentials in it are refused unseen."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UserError("the endpoint holds credentials; put them into access_key_id and secret_access_key")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{url!r} is not an endpoint; write http://HOST:PORT or https://HOST")
    return url.rstrip("/")


def _check_names(globs: tuple[str, ...]) -> tuple[str, ...]:
    return NameGlobs(globs).globs


def _check_paths(globs: tuple[str, ...]) -> tuple[str, ...]:
    return PathGlobs(globs).globs


def _check_intervals(intervals: dict[str, float]) -> dict[str, float]:
    PathGlobs(intervals)
    for glob, seconds in intervals.items():
        if seconds < 1:
            raise UserError(f"the interval of {glob!r} must be at least 1s, not {exact_duration(seconds)}")
    return intervals


def _parse_keep_local(value: Any) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"newest +([1-9][0-9]{0,5})", str(value))
    if match is None:
        raise UserError(f"{value!r} does not say which checkpoints stay on the disk; write it as `newest 2`")
    return int(match[1])


Size = Annotated[
    int,
    BeforeValidator(_readable(parse_size)),
    PlainSerializer(exact_size, when_used="json"),
    WithJsonSchema({"type": "string", "title": "size", "description": SIZE_HELP}),
]
Duration = Annotated[
    float,
    BeforeValidator(_readable(parse_duration)),
    PlainSerializer(exact_duration, when_used="json"),
    WithJsonSchema({"type": "string", "title": "duration", "description": DURATION_HELP}),
]
KeepLocal = Annotated[
    int | None,
    BeforeValidator(_readable(_parse_keep_local)),
    PlainSerializer(lambda count: None if count is None else f"newest {count}", when_used="json"),
    WithJsonSchema({"type": "string", "title": "newest N", "pattern": "^newest [1-9][0-9]*$"}),
]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute_path)]
Names = Annotated[tuple[str, ...], AfterValidator(_readable(_check_names))]
Paths = Annotated[tuple[str, ...], AfterValidator(_readable(_check_paths))]
Intervals = Annotated[dict[str, Duration], AfterValidator(_readable(_check_intervals))]
StoreUrl = Annotated[str, AfterValidator(_readable(check_store))]
Endpoint = Annotated[str, AfterValidator(_readable(check_endpoint))]
WorkspaceName = Annotated[str, AfterValidator(_readable(check_workspace))]


class Section(BaseModel):
    """A group of settings: frozen, closed to unknown keys, silent about what it was given."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)


class S3Settings(Section):
    """How to reach an S3 store."""

    endpoint: Endpoint | None = Field(
        default=None, description="URL of an S3 server other than AWS, such as http://host:8333."
    )
    region: str | None = Field(
        default=None, description="Region of the bucket; otherwise what the AWS configuration says."
    )
    path_style: bool | None = Field(
        default=None,
        description="Put the bucket into the path rather than the host name; by default so with an endpoint.",
    )
    profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Key id; otherwise the usual AWS chain finds one."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key that belongs to access_key_id.")
    session_token: SecretStr | None = Field(default=None, description="Token of temporary credentials.")


class GcsSettings(Section):
    """How to reach a Google Cloud Storage store."""

    endpoint: Endpoint | None = Field(default=None, description="URL of another server than storage.googleapis.com.")
    access_key_id: SecretStr | None = Field(default=None, description="HMAC key id of the service account.")
    secret_access_key: SecretStr | None = Field(default=None, description="HMAC secret that belongs to access_key_id.")


class RetentionSettings(Section):
    """Which states stay. The head, the newest quiescent, named and pinned ones always do."""

    last: Duration = Field(default=3600.0, description="Every state younger than this stays readable.")


class MountSettings(Section):
    """Options of the FUSE mount."""

    kernel_writeback: bool = Field(
        default=False,
        description="Let the kernel gather small writes. Faster, but what it holds dies with the daemon: an "
        "acknowledged write is then safe only after fsync.",
    )
    xattrs: bool = Field(
        default=True, description="Serve extended attributes. Off saves a request per write; they are kept in any case."
    )
    atime: Literal["noatime", "relatime"] = Field(
        default="noatime", description="Whether reading a file notes the time."
    )
    allow_other: bool = Field(
        default=True,
        description="Let other users in where permitted: for root, or with user_allow_other in /etc/fuse.conf.",
    )


class Settings(Section):
    """All settings. None means that the value follows from others; its description says how."""

    store: StoreUrl | None = Field(
        default=None,
        description="Where states are published: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///DIRECTORY. "
        "By default the directory `store` in state_dir, which dies with this machine.",
    )
    workspace: WorkspaceName | None = Field(
        default=None,
        description="Name in the store; by default your user name and the mountpoint's last part, as in me-run7.",
    )
    state_dir: AbsolutePath = Field(
        default=Path("~/.spotwarp"),
        description="What SpotWarp keeps on this machine: mounts, logs, default cache and store.",
    )
    cache_dir: AbsolutePath | None = Field(
        default=None,
        description="The node's copy of the workspace; by default cache/<workspace> in state_dir. Use a fast disk.",
    )
    cache_size: Size | None = Field(
        default=None,
        ge=64 * MiB,
        description="Budget of the cache; by default 80 % of what is free on its disk, and never into free_reserve.",
    )
    free_reserve: Size = Field(
        default=GiB, ge=64 * MiB, description="Disk space that the default cache_size leaves alone."
    )
    memory_max: Size = Field(default=GiB, ge=192 * MiB, description="Budget for all buffers of the daemon.")
    mode: Literal["auto", "fuse", "directory"] = Field(
        default="auto", description="Form of the workspace; auto takes fuse where a test mount works."
    )
    interval: Duration = Field(
        default=30.0,
        ge=1.0,
        le=3600.0,
        description="A state is published at least this often while there are changes (RPO).",
    )
    intervals: Intervals = Field(
        default={},
        description="Shorter or longer interval for changes below some paths, by glob: {logs: 5s, '*.tmp': 10m}.",
    )
    fsync: Literal["local", "remote"] = Field(
        default="local",
        description="What fsync waits for: this node's disk, or the publishing of the state (slow, safest).",
    )
    atomic: Names = Field(default=ATOMIC_FILES, description="Files, by name, that are never restored half written.")
    atomic_dirs: Names = Field(
        default=ATOMIC_DIRECTORIES, description="Directories, by name, that are complete only as a whole."
    )
    atomic_max_age: Duration = Field(
        default=15 * MINUTE_S,
        description="A takeover mounts the newest quiescent state if it is at most this much older than the head.",
    )
    scratch: Paths = Field(
        default=SCRATCH,
        description="Paths, by glob, that stay on the node and are never published: caches of downloads.",
    )
    write_wait_max: Duration = Field(
        default=5 * MINUTE_S,
        le=9 * MINUTE_S,
        description="With a full cache and a slow store a write waits this long, then fails with ENOSPC.",
    )
    drain_timeout: Duration = Field(
        default=10 * MINUTE_S, description="How long umount and stop may publish what is left before they give up."
    )
    notice_timeout: Duration = Field(
        default=25.0, description="The same after SIGTERM or an eviction notice that names no time of its own."
    )
    upload_threads: int = Field(default=8, ge=1, le=64, description="Packs sent at the same time, at most.")
    fetch_threads: int = Field(default=16, ge=1, le=128, description="Ranges fetched at the same time, at most.")
    hydrate: Literal["lazy", "all"] = Field(
        default="lazy",
        description="After a takeover fetch ahead what will likely be read (lazy), or then also everything else that "
        "fits into four fifths of the cache (all).",
    )
    keep_local: KeepLocal = Field(
        default=None,
        description="In the directory form: drop checkpoints older than the newest N from the disk once they are "
        "published, as in `newest 2`; they come back when they are opened. By default nothing is dropped.",
    )
    grace: Duration = Field(
        default=10 * MINUTE_S,
        ge=MINUTE_S,
        le=30 * MINUTE_S,
        description="A pack that nothing needs is deleted this long after a published state condemned it.",
    )
    retention: RetentionSettings = Field(default=RetentionSettings(), description="Which older states stay.")
    unsafe_single_writer: bool = Field(
        default=False,
        description="Write to a store that ignores conditional requests. Two writers then destroy each other's work.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the daemon logs."
    )
    mount: MountSettings = Field(default=MountSettings(), description="Options of the FUSE mount.")
    s3: S3Settings = Field(default=S3Settings(), description="How to reach an S3 store.")
    gs: GcsSettings = Field(default=GcsSettings(), description="How to reach a Google Cloud Storage store.")

    def policies(self) -> Policies:
        """Compile the globs."""
        return Policies.build(
            atomic=self.atomic,
            atomic_dirs=self.atomic_dirs,
            scratch=self.scratch,
            interval_s=self.interval,
            intervals=self.intervals,
        )

    def store_url(self) -> str:
        """Return the store's URL, the default one included."""
        return self.store or f"file://{self.state_dir / 'store'}"


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if is_section(info):
            assert isinstance(info.annotation, type)
            yield from _leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def is_section(info: FieldInfo) -> bool:
    """Tell whether a field is a group of settings rather than one."""
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


KEYS: Final[dict[str, FieldInfo]] = dict(_leaves(Settings))
"""Every setting by its dotted name, in the order of the documentation."""
SECRET_KEYS: Final = frozenset(key for key, info in KEYS.items() if "SecretStr" in str(info.annotation))
LIST_KEYS: Final = frozenset(key for key, info in KEYS.items() if get_origin(info.annotation) is tuple)
MAP_KEYS: Final = frozenset(key for key, info in KEYS.items() if get_origin(info.annotation) is dict)


def variable(key: str) -> str:
    """Return the environment variable of a setting.

    >>> variable("s3.endpoint")
    'SPOTWARP_S3_ENDPOINT'
    """
    return f"SPOTWARP_{key.upper().replace('.', '_')}"
