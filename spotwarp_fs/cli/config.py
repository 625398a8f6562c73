"""`spotwarp config`: show, check or begin a configuration file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for
from spotwarp_fs.core.errors import ExitCode, UserError


@click.group("config")
def command() -> None:
    """Show, check or begin a configuration file.

    The file is SPOTWARP_CONFIG, else config.yaml in SPOTWARP_STATE_DIR, else ~/.spotwarp/config.yaml. SPOTWARP_*
    variables come before it, options of a command before both. Secrets are never shown.
    """


@command.command("show")
@click.option("--all", "show_all", is_flag=True, help="Also with what each setting is for.")
@json_option
def show(show_all: bool, as_json: bool) -> None:
    """Show every setting in force and where it was set."""
    from spotwarp_fs.cli import config_view
    from spotwarp_fs.cli.settings import KEYS

    loaded = settings_for()
    if as_json:
        output.print_json({"ok": True, **config_view.document(loaded)})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", *(["meaning"] if show_all else []), box=None, pad_edge=False)
    for key, value, place in config_view.lines(loaded):
        cells = [key, output.printable(value), place, *([str(KEYS[key].description)] if show_all else [])]
        table.add_row(*(Text(cell, style="" if place != "default" else "dim") for cell in cells))
    state = "" if loaded.config_found else " (does not exist; `spotwarp config init` writes it)"
    output.console().print(Text(f"{loaded.config_path}{state}\n"))
    output.console().print(table)


@command.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
def check(file: Path | None, as_json: bool) -> None:
    """Check the configuration file, or FILE, and the SPOTWARP_* variables; exit code 3 if anything is wrong.

    The file is also checked by itself, so that a wrong value does not hide behind a variable.
    """
    from spotwarp_fs.cli import sources

    if file is not None:
        path = file
        given = sources.read_file(path)
    else:
        path = sources.config_path(os.environ)
        given = sources.read_file(path) if path.exists() or os.environ.get("SPOTWARP_CONFIG") else {}
    sources.validated(given)
    if file is None:
        settings_for()
    count = f"{len(given)} settings" if len(given) != 1 else "1 setting"
    found = f"{path}: {count}, all fine" if given or path.exists() else f"{path} does not exist; the defaults hold"
    output.emit({"config_path": str(path), "settings": sorted(given)}, found, as_json=as_json)


@command.command("init")
@click.option("--store", metavar="URL", help="Store to write into it.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def init(store: str | None, force: bool, as_json: bool) -> None:
    """Write a commented configuration file that only its owner can read."""
    from spotwarp_fs.cli import config_view, sources
    from spotwarp_fs.cli.settings import check_store

    path = sources.config_path(os.environ)
    text = config_view.template(check_store(store) if store else None)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        if force:
            draft.replace(path)
        else:
            # A link, unlike a rename, never replaces what somebody wrote in the meantime.
            os.link(draft, path)
    except FileExistsError:
        raise UserError(f"{path} exists; --force replaces it", ExitCode.CONFIG) from None
    finally:
        draft.unlink(missing_ok=True)
    output.emit({"config_path": str(path)}, f"{path} is written; everything in it is optional", as_json=as_json)


@command.command("schema")
@click.option("--markdown", is_flag=True, help="Print the table of the documentation instead.")
@json_option
def schema(markdown: bool, as_json: bool) -> None:
    """Print the JSON schema of the configuration file, for editors."""
    from spotwarp_fs.cli.settings import Settings

    if markdown:
        from spotwarp_fs.cli import config_view

        click.echo(config_view.markdown())
        return
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    output.print_json({"ok": True, "schema": document} if as_json else document)
