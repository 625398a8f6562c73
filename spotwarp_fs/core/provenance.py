"""What a run was started with, kept beside its states, and how that compares with another node.

    <workspace>/.spotwarp-run.json    the whole record, as JSON: a file like any other, so every form restores it
    notes["run"] of each manifest     `summary`: a digest of that file and a few short fields

Invariant: a record holds no secret (`core.secrets`); what was left out is listed by name. Nothing is decided by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import blake3

FILE_NAME: Final = ".spotwarp-run.json"
NOTE: Final = "run"
"""Name of the manifest's note."""
RECORD_BYTES_MAX: Final = 4 << 20
"""A record that is larger was not written by us."""
DIFF_BYTES_MAX: Final = 256 << 10
NOTE_TEXT_MAX: Final = 100
NOTE_BYTES_MAX: Final = 1024
"""Notes stand in every manifest for ever."""
NAMED_MAX: Final = 12
"""Differing packages or variables that are named; the rest is counted."""
_TELLING: Final = (
    "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "PYTHON", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "XLA_", "JAX_", "TF_",
    "WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH",
)  # fmt: skip
"""Variables by which a training run differs; others (HOSTNAME, PATH) differ on every node."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a command was started with; empty fields are unknown or absent."""

    command: tuple[str, ...]
    directory: str
    python: str = ""
    """Version of the command's interpreter, if it is a Python."""
    packages: Mapping[str, str] = field(default_factory=dict)
    git_commit: str = ""
    git_diff: str = ""
    """What is not committed, without what looks like a secret."""
    git_diff_cut: bool = False
    """It was longer than `DIFF_BYTES_MAX`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of variables that were left out."""
    gpus: tuple[str, ...] = ()
    driver: str = ""


def encode(record: Provenance) -> bytes:
    """Write the one text that a record has: sorted, one key a line, for people to read and to compare."""
    text = json.dumps(asdict(record), indent=1, sort_keys=True, ensure_ascii=True)
    return text.encode("ascii") + b"\n"


def decode(body: bytes) -> Provenance:
    """Read what `encode` wrote, without a newer version's extra fields, or raise ValueError."""
    values = json.loads(body)
    if not isinstance(values, dict):
        raise ValueError("the record is no JSON object")
    try:
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(Provenance) if item.name in values}
        for name in {"command", "secrets", "gpus"} & known.keys():
            known[name] = tuple(map(str, known[name]))
        for name in {"packages", "environment"} & known.keys():
            known[name] = {str(key): str(value) for key, value in known[name].items()}
        return Provenance(**known)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the record has a missing or wrong field: {error}") from error


def digest_of(record: Provenance) -> str:
    """Name a record by its content, in 16 hex digits."""
    return blake3.blake3(encode(record)).hexdigest()[:16]


def summary(record: Provenance) -> dict[str, str]:
    """Give what every manifest notes of a record."""
    dirty = "+changes" if record.git_diff else ""
    note = {
        "record": digest_of(record),
        "command": " ".join(record.command),
        "python": record.python,
        "git": record.git_commit[:12] + dirty if record.git_commit else "",
        "gpu": _counted(record.gpus),
    }
    return {name: text[:NOTE_TEXT_MAX] for name, text in note.items() if text}


def check_note(note: Mapping[str, Any]) -> dict[str, str]:
    """Return a note that manifests may carry, or raise ValueError: small, and texts only."""
    texts = {str(name): str(text) for name, text in note.items()}
    size = len(json.dumps(texts))
    if size > NOTE_BYTES_MAX:
        raise ValueError(f"the note has {size} bytes; a manifest's note has {NOTE_BYTES_MAX} at most")
    return texts


def differences(before: Provenance, now: Provenance) -> list[str]:
    """Say in lines what differs between two runs; an empty field on either side is unknown and not compared."""
    lines = [
        f"{what}: {was} before, {found} now"
        for what, was, found in (
            ("Python", before.python, now.python),
            ("git commit", before.git_commit[:12], now.git_commit[:12]),
            ("GPU", _counted(before.gpus), _counted(now.gpus)),
            ("GPU driver", before.driver, now.driver),
            ("command", " ".join(before.command), " ".join(now.command)),
        )
        if was and found and was != found
    ]
    if before.gpus and not now.gpus:
        lines.append(f"GPU: {_counted(before.gpus)} before, none found now")
    if before.git_commit and now.git_commit and before.git_diff != now.git_diff:
        lines.append("uncommitted changes (git diff) are not the same")
    if before.packages and now.packages:
        lines += _compared("package", before.packages, now.packages)
    return lines + _compared("variable", _telling(before.environment), _telling(now.environment))


def _counted(names: tuple[str, ...]) -> str:
    """Write `8 x H100`, or each kind with its number."""
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


def _telling(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_TELLING)}


def _compared(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    lines = [
        f"{what} {name}: {before.get(name, 'absent')} before, {now.get(name, 'absent')} now"
        for name in names[:NAMED_MAX]
    ]
    more = len(names) - NAMED_MAX
    return [*lines, f"and {more} more {what}s"] if more > 0 else lines
