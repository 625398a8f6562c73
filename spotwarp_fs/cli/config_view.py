"""Write the settings down: as a table of what is in force, as a commented file, as documentation.

Invariant: every rendering goes through `as_written`, which masks secrets.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Final

from spotwarp_fs.cli.settings import KEYS, SECRET_KEYS, Settings, variable
from spotwarp_fs.cli.sources import LoadedSettings

MASK: Final = "••••••"
DERIVED: Final = {
    "store": "file://<state_dir>/store",
    "workspace": "<user>-<last part of the mountpoint>",
    "cache_dir": "<state_dir>/cache/<workspace>",
    "cache_size": "80 % of the free disk",
}
"""What an unset key amounts to, for people."""


def values(settings: Settings) -> dict[str, Any]:
    """Return every setting by dotted key as people write it: sizes and durations as text, secrets masked."""
    found: dict[str, Any] = {}
    dumped = settings.model_dump(mode="json")
    for key in KEYS:
        level: Any = dumped
        for part in key.split("."):
            level = level[part]
        found[key] = MASK if key in SECRET_KEYS and level is not None else level
    return found


def as_written(value: Any) -> str:
    """Return a value as it would stand in the file.

    >>> as_written(["*.pt"]), as_written(True), as_written("30s"), as_written(None)
    ("['*.pt']", 'true', '30s', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(f"'{item}'" for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"'{name}': {item}" for name, item in value.items()) + "}"
    return str(value)


def shown(key: str, value: Any) -> str:
    """Return a value for people: what an unset one amounts to, in parentheses."""
    if value is None:
        return f"({DERIVED[key]})" if key in DERIVED else "(not set)"
    return as_written(value)


def document(loaded: LoadedSettings) -> dict[str, Any]:
    """Return the settings in force with their sources, for JSON."""
    return {
        "config_path": str(loaded.config_path),
        "config_found": loaded.config_found,
        "settings": {
            key: {"value": value, "source": loaded.source(key).kind, "place": loaded.source(key).place}
            for key, value in values(loaded.settings).items()
        },
    }


def lines(loaded: LoadedSettings) -> Iterator[tuple[str, str, str]]:
    """Give key, value and source of every setting, for a table."""
    for key, value in values(loaded.settings).items():
        yield key, shown(key, value), loaded.source(key).place


def template(store: str | None = None) -> str:
    """Write a file that sets nothing but *store* and explains everything.

    Keys are dotted, so that each line can be uncommented by itself.
    """
    head = "Settings of SpotWarp. SPOTWARP_* variables and options of the command come before what stands here. "
    head += "Sizes are written as 200G (1024-based), durations as 30s, 5m, 1h30m."
    parts = ["\n".join(f"# {line}" for line in textwrap.wrap(head, 100))]
    for key, value in values(Settings()).items():
        text = "\n".join(f"# {line}" for line in textwrap.wrap(str(KEYS[key].description), 100))
        written = as_written(_default(key, value))
        line = (
            f"{key}: {json.dumps(store)}" if key == "store" and store else f"#{key}:{' ' + written if written else ''}"
        )
        parts.append(f"{text}\n{line}")
    return "\n\n".join(parts) + "\n"


def markdown() -> str:
    """Write the table of docs/OPERATIONS.md; a test compares them."""
    rows = ["| key | variable | default | meaning |", "|---|---|---|---|"]
    for key, value in values(Settings()).items():
        default = _default(key, value)
        text = f"`{as_written(default)}`" if default is not None else DERIVED.get(key, "")
        rows.append(f"| `{key}` | `{variable(key)}` | {text.replace('<', '&lt;')} | {KEYS[key].description} |")
    return "\n".join(rows)


def _default(key: str, value: Any) -> Any:
    """Return the default as it is declared: with `~`, not with the home of whoever runs this."""
    return str(KEYS[key].default) if key == "state_dir" else value
