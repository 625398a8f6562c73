"""Provenance of a run: written into the workspace, noted in every manifest, compared with the run before.

Invariant: a run is never kept from starting by this; what could not be recorded is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from spotwarp_fs.cli.running.command import Command
from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.cli.running.saying import say
from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.provenance import (
    FILE_NAME,
    RECORD_BYTES_MAX,
    Provenance,
    decode,
    differences,
    encode,
    summary,
)
from spotwarp_fs.local.provenance import gather

SECRETS_NAMED_MAX: Final = 12


def record(form: Form, command: Command, environment: Mapping[str, str], *, resumed: bool) -> dict[str, str]:
    """Write down what is about to run, say what differs from the last time, and return the note for manifests."""
    now = gather(command.argv, command.directory, environment)
    path = form.path / FILE_NAME
    before = _read(path)
    if resumed and before is not None:
        _say_differences(differences(before, now))
    if now.secrets:
        more = len(now.secrets) - SECRETS_NAMED_MAX
        names = ", ".join(now.secrets[:SECRETS_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        say(f"not recorded, for they look like secrets: {names}")
    try:
        _write(path, encode(now))
    except OSError as error:
        say(f"warning: what runs here is not recorded: {path} cannot be written: {error.strerror}")
    return summary(now)


def note(form: Form, text: Mapping[str, str]) -> None:
    """Have the manifests of the daemon that serves now carry the note."""
    try:
        form.call("note", {"note": dict(text)})
    except SpotwarpError as error:
        say(f"warning: manifests do not say what runs here: {error}")


def _read(path: Path) -> Provenance | None:
    try:
        with path.open("rb") as file:
            return decode(file.read(RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return None


def _write(path: Path, body: bytes) -> None:
    """Replace the file whole, and leave it alone if it says the same: a state that does not change costs nothing."""
    with suppress(OSError):
        if path.read_bytes() == body:
            return
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(body)
    os.replace(draft, path)


def _say_differences(lines: list[str]) -> None:
    if lines:
        say("since the state that is resumed was written, this has changed:")
        for line in lines:
            say(f"  {line}")
