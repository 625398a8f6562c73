"""Print results and errors: one JSON document for machines, rich text for people.

Invariant: with `--json` exactly one document goes to standard output, whatever happens; everything meant for eyes goes
to standard error when standard output carries data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spotwarp_fs.core.errors import ExitCode, SpotwarpError
from spotwarp_fs.core.units import format_size

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """Return a console; rich is loaded at the first line, so that `--help` need not wait for it."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document on one line; names that are not UTF-8 survive as escaped surrogates."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def emit(result: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a result, as a document or as a line of text (rich markup is not read)."""
    if as_json:
        print_json({"ok": True, **result})
    else:
        console().print(printable(text), markup=False)


def printable(text: str) -> str:
    """Make names with control characters or bytes that are not UTF-8 safe for a terminal."""
    return "".join(
        char if char in "\n\t" or (char.isprintable() and not 0xD800 <= ord(char) <= 0xDFFF) else _escaped(char)
        for char in text
    )


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else char.encode("unicode_escape").decode("ascii")


def error_document(error: BaseException, code: int) -> dict[str, Any]:
    """Return the document that stands for an error."""
    name = ExitCode(code).name if code in set(ExitCode) else "INTERRUPTED" if code == 130 else "FAILED"
    return {
        "ok": False,
        "error": {
            "kind": type(error).__name__,
            "message": str(error),
            "exit_code": int(code),
            "exit_name": name,
        },
    }


def print_error(error: BaseException, code: int, *, as_json: bool) -> None:
    """Report what ended the command."""
    if as_json:
        print_json(error_document(error, code))
        return
    from rich.text import Text

    message = str(error) or type(error).__name__
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), printable(message)))


def warn(message: str) -> None:
    """Print a warning for people, on standard error."""
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("warning: ", "bold yellow"), printable(message)))


def first_of_group(error: BaseException) -> BaseException:
    """Look into exception groups, as nurseries raise them, for what explains the most: our errors before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_of_group(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, SpotwarpError)), leaves[0])


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show progress reports of the form `{"done_bytes", "total_bytes", "phase"}` on a terminal, or swallow them."""
    if not (shown and sys.stderr.isatty()):
        yield lambda report: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, figures="")

        def report(values: Mapping[str, Any]) -> None:
            done, total = values.get("done_bytes"), values.get("total_bytes")
            figures = "" if done is None else format_size(done) + (f" of {format_size(total)}" if total else "")
            title_now = f"{title}: {values['phase']}" if values.get("phase") else title
            progress.update(task, completed=done or 0, total=total, figures=figures, description=title_now)

        yield report
