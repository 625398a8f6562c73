"""Commands that other packages add to `spotwarp`: found by an entry point, so that nothing here imports them.

An entry point of the group `spotwarp.commands` names a table like `main.COMMANDS`, whose modules are given in full:
`{"plan": ("provisioner.cli.plan", "What it does.")}`; an empty help hides a command from the list. Invariant: the
table alone is imported for a list, a command's module only when it runs; a package that cannot be loaded is named in
an error of its own and harms no other command.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

GROUP = "spotwarp.commands"


@dataclass(frozen=True, slots=True)
class Plugins:
    """What was found."""

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Module and short help by name."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Why a package's table cannot be read, by the package's entry point."""


def find_plugins() -> Plugins:
    """Read every package's table."""
    # Loaded late: it costs half of what `--help` does, and most commands never ask.
    from importlib.metadata import entry_points

    commands: dict[str, tuple[str, str]] = {}
    broken: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            table = dict(point.load())
            commands |= {str(name): (str(module), str(short)) for name, (module, short) in table.items()}
        except Exception as error:  # whatever is wrong with it, the other commands go on
            broken[point.name] = f"{point.value}: {type(error).__name__}: {error}"
    return Plugins(commands, broken)


def load_plugin(name: str) -> click.Command | None:
    """Import the command *name* of some package; None when no package has it, ClickException when it is broken."""
    found = find_plugins()
    if name not in found.commands:
        if found.broken:
            raise click.ClickException(f"no command {name!r} here, and not every package can be asked: {told(found)}")
        return None
    module = found.commands[name][0]
    try:
        command = importlib.import_module(module).command
    except (ImportError, AttributeError, SyntaxError) as error:
        raise click.ClickException(
            f"the command {name!r} of {module} cannot be loaded ({type(error).__name__}: {error}): "
            "install SpotWarp again"
        ) from error
    assert isinstance(command, click.Command)
    return command


def told(found: Plugins) -> str:
    """Say which packages are broken."""
    why = "; ".join(f"{name} ({words})" for name, words in sorted(found.broken.items()))
    return f"{why}: install SpotWarp again"
