"""Read what people type after an option, or raise BadWish with the option, the text and an example.

Invariant: pure; every reader is total over text and names the option that it reads for.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

from provisioner.core.errors import BadWish
from provisioner.core.intents import label_of
from provisioner.core.offers import BID_AUTO_FACTOR
from spotwarp_fs.api import UserError, parse_duration

GPUS_MAX: Final = 16
"""No marketplace machine has more; a workspace has one writer node, so a job cannot span several."""
DISK_GB_MAX: Final = 1_000_000
USD_MAX: Final = 1_000_000.0
PROVIDERS: Final = ("vast", "runpod", "local")
_LOCAL: Final = re.compile(r"local(?:-[a-z0-9]{1,32})?")
_NUMBER: Final = r"[0-9]{1,12}(?:\.[0-9]{1,9})?"
_LINK: Final = re.compile(rf"({_NUMBER})\s*([mg])bps", re.IGNORECASE | re.ASCII)
_DISK: Final = re.compile(rf"({_NUMBER})\s*([GT])B?", re.IGNORECASE | re.ASCII)
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([MGT])B?", re.IGNORECASE | re.ASCII)
_GB: Final = {"M": 0.001, "G": 1.0, "T": 1000.0}


def link_mbps(option: str, text: str) -> float:
    """Read a link's speed.

    >>> link_mbps("--min-up", "500mbps"), link_mbps("--min-up", "1.5gbps")
    (500.0, 1500.0)
    """
    found = _LINK.fullmatch(text.strip())
    if found is None:
        raise BadWish(f"{option} {text}: write megabits or gigabits per second, as in 500mbps or 1gbps")
    return float(found[1]) * (1000.0 if found[2].lower() == "g" else 1.0)


def disk_gb(option: str, text: str) -> float:
    """Read a disk in GB of 10^9 bytes, as providers bill them.

    >>> disk_gb("--disk", "200G"), disk_gb("--disk", "1.5TB")
    (200.0, 1500.0)
    """
    found = _DISK.fullmatch(text.strip())
    size = float(found[1]) * _GB[found[2].upper()] if found else 0.0
    if not 0 < size <= DISK_GB_MAX:
        raise BadWish(f"{option} {text}: write a size in GB as providers bill it, as in 200G or 1.5T")
    return size


def size_gb(option: str, text: str) -> float:
    """Read a size of files, in GB of 10^9 bytes.

    >>> size_gb("--checkpoint-size", "94G"), size_gb("--checkpoint-size", "700MB")
    (94.0, 0.7)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BadWish(f"{option} {text}: write a size, as in 94G or 700MB")
    return round(float(found[1]) * _GB[found[2].upper()], 9)


def usd(option: str, text: str) -> float:
    """Read dollars.

    >>> usd("--budget", "200"), usd("--max-price", "$1.20")
    (200.0, 1.2)
    """
    try:
        found = float(text.strip().removeprefix("$"))
    except ValueError:
        found = math.nan
    if not 0.0 < found <= USD_MAX:
        raise BadWish(f"{option} {text}: write dollars above zero, as in 1.20")
    return found


def share(option: str, text: str) -> float:
    """Read a share between 0 and 1.

    >>> share("--move-below", "25%"), share("--min-reliability", "0.95")
    (0.25, 0.95)
    """
    stripped = text.strip()
    try:
        found = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not 0.0 < found <= 1.0:
        raise BadWish(f"{option} {text}: write a share, as in 25% or 0.25")
    return found


def bid(option: str, text: str) -> tuple[float, float | None]:
    """Read (factor of the minimum bid, fixed bid in dollars per hour for the machine).

    >>> bid("--bid", "auto"), bid("--bid", "0.45")
    ((1.15, None), (1.15, 0.45))
    """
    if text.strip().lower() == "auto":
        return BID_AUTO_FACTOR, None
    try:
        return BID_AUTO_FACTOR, usd(option, text)
    except BadWish:
        raise BadWish(
            f"{option} {text}: write auto (the lowest bid times {BID_AUTO_FACTOR}) or dollars per hour"
        ) from None


def seconds(option: str, text: str, *, least_s: float = 0.0) -> float:
    """Read a duration.

    >>> seconds("--keep-lost", "30m")
    1800.0
    """
    try:
        found = parse_duration(text)
    except UserError as error:
        raise BadWish(f"{option}: {error}") from error
    if found < least_s:
        raise BadWish(f"{option} {text}: the least is {least_s:g}s")
    return found


def gpus(option: str, count: int) -> int:
    """Check the number of GPUs of one machine."""
    if count > GPUS_MAX:
        raise BadWish(
            f"{option} {count}: a workspace has one writer node, and no machine on the market has more than {GPUS_MAX} "
            "GPUs; give each node of a larger job a workspace and a job of its own"
        )
    if count < 1:
        raise BadWish(f"{option} {count}: write how many GPUs of one machine the command uses, at least 1")
    return count


def names(option: str, text: str) -> tuple[str, ...]:
    """Split `a,b`, without empty ones and repetitions.

    >>> names("--region", "EU, US,,EU")
    ('EU', 'US')
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise BadWish(f"{option} {text!r}: write at least one name; several are separated by commas")
    return found


def providers(option: str, text: str, *, plugged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Read providers' names, or say which are known; *plugged* are those that other packages bring.

    >>> providers("--providers", "vast,local-a")
    ('vast', 'local-a')
    """
    found = names(option, text)
    for name in found:
        known = (*PROVIDERS, *plugged)
        if name not in known and not _LOCAL.fullmatch(name):
            listed = f"{', '.join(known)} and local-NAME"
            raise BadWish(f"{option}: no provider is named {name!r}{near(name, known)}; known are {listed}")
    return found


def near(text: str, known: Iterable[str]) -> str:
    """Say what may have been meant, or nothing.

    >>> near("vats", ("vast", "runpod"))
    ', did you mean vast?'
    """
    found = difflib.get_close_matches(text, list(known), n=1)
    return f", did you mean {found[0]}?" if found else ""


def job_name(option: str, text: str) -> str:
    """Check the name of a job."""
    try:
        label_of(text, "00000000", 1)
    except BadWish as error:
        raise BadWish(f"{option}: {error}") from error
    return text


def job_of_workspace(workspace: str) -> str:
    """Make a job's name of a workspace's.

    >>> job_of_workspace("ada-my_run.7")
    'ada-my-run-7'
    """
    return re.sub(r"[^a-z0-9]+", "-", workspace.lower()).strip("-") or "job"
