"""Read the files that hold secrets for the job: `--env-file` and `--image-login`. Nothing secret is typed.

Invariant: a file that others can read is refused; messages quote a line's number and a name, never a value (P-15).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from provisioner.core.errors import BadWish

FILE_BYTES_MAX: Final = 64 * 1024
VARIABLES_MAX: Final = 40
"""RunPod takes 50 in all, and SpotWarp needs some."""
ACCOUNT_KEYS: Final = frozenset({"VAST_API_KEY", "RUNPOD_API_KEY", "CONTAINER_API_KEY", "RUNPOD_POD_ID"})
"""Keys of the account never reach a node; the last two are what providers set themselves."""
LOGIN_FIELDS: Final = ("registry", "user", "password", "runpod")
DOCKER_HUB: Final = "docker.io"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ImageLogin:
    """How to pull a private image."""

    registry: str = DOCKER_HUB
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    runpod: str = ""
    """The id of a registry login that is kept in the RunPod account."""

    def told_to(self, provider: str) -> str | None:
        """Return it in the form that *provider* takes; None where it has none."""
        if provider == "runpod":
            return self.runpod or None
        return f"-u {self.user} -p {self.password} {self.registry}" if self.user else None


def read_environment_file(path: Path) -> dict[str, str]:
    """Read `NAME=VALUE` lines; blank lines and `#` comments are passed over, one pair of quotes around is dropped."""
    found: dict[str, str] = {}
    for number, line in _lines("--env-file", path):
        name, equals, value = line.removeprefix("export ").partition("=")
        name = name.strip()
        if not equals or not _NAME.fullmatch(name):
            raise BadWish(f"--env-file {path}:{number}: expected NAME=VALUE with a name of letters, digits and _")
        if name in found:
            raise BadWish(f"--env-file {path}:{number}: {name} is set twice")
        if name in ACCOUNT_KEYS:
            raise BadWish(f"--env-file {path}:{number}: {name} belongs to the account and is never given to a node")
        if name.startswith("SPOTWARP_"):
            raise BadWish(f"--env-file {path}:{number}: {name} is SpotWarp's own; set it here and the node gets it")
        if "\0" in value:
            raise BadWish(f"--env-file {path}:{number}: {name} holds a zero byte, which no variable can")
        found[name] = _unquoted(value.strip())
    if len(found) > VARIABLES_MAX:
        raise BadWish(f"--env-file {path} has {len(found)} variables, the most is {VARIABLES_MAX}")
    return found


def read_image_login(path: Path) -> ImageLogin:
    """Read `registry=`, `user=`, `password=` (Vast and others) and `runpod=` (the id of a login in the account)."""
    found: dict[str, str] = {}
    for number, line in _lines("--image-login", path):
        name, equals, value = line.partition("=")
        if not equals or name.strip() not in LOGIN_FIELDS:
            raise BadWish(f"--image-login {path}:{number}: expected one of {', '.join(LOGIN_FIELDS)}, each with =VALUE")
        found[name.strip()] = _unquoted(value.strip())
    login = ImageLogin(**found)
    if bool(login.user) != bool(login.password):
        raise BadWish(f"--image-login {path}: user and password belong together; one of them is missing")
    if not login.user and not login.runpod:
        raise BadWish(f"--image-login {path}: has neither user and password nor runpod=ID; see docs/OPERATIONS.md")
    if any(part.isspace() for value in found.values() for part in value):
        raise BadWish(f"--image-login {path}: a value with a blank in it cannot be passed to a provider")
    return login


def _lines(option: str, path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_private_text(option, path).splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


def _private_text(option: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            body = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadWish(f"{option} {path}: cannot be read ({error.strerror})") from error
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadWish(f"{option} {path} has mode {mode:04o}, which lets others in; run: chmod 600 {path}")
    if len(body) > FILE_BYTES_MAX:
        raise BadWish(f"{option} {path} is larger than {FILE_BYTES_MAX} bytes: this is no file of variables")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        raise BadWish(f"{option} {path} is not UTF-8 text") from None


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def secrets_of(environment: Mapping[str, str], login: ImageLogin | None) -> frozenset[str]:
    """Return every text that nothing may show; short values are no secrets, and would blot out words."""
    values = {*environment.values(), *((login.password,) if login else ())}
    return frozenset(value for value in values if len(value) >= SECRET_CHARS_MIN)


SECRET_CHARS_MIN: Final = 6
