"""`spotwarp run` in order: choose the form, wait for the workspace, serve it, run the command, publish, say all that.

Invariant: from the moment the workspace is served until the return, every way out closes it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotwarp_fs.cli.derived import cache_directory, workspace_of
from spotwarp_fs.cli.permit_file import PermitFile
from spotwarp_fs.cli.running import forms
from spotwarp_fs.cli.running.child import Child, adopt_orphans
from spotwarp_fs.cli.running.command import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    Command,
    NoCommand,
    check_before,
    check_now,
    command_of,
    environment_of,
    refuse_nested,
)
from spotwarp_fs.cli.running.ending import exit_code, publish_rest
from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.cli.running.outside import Outside
from spotwarp_fs.cli.running.patience import open_when_free
from spotwarp_fs.cli.running.recording import note, record
from spotwarp_fs.cli.running.saying import say
from spotwarp_fs.cli.running.signals import Bell, StopRequested, stop_raises
from spotwarp_fs.cli.running.supervising import Supervising
from spotwarp_fs.cli.running.terminal import Terminal
from spotwarp_fs.cli.running.wish import RunWish
from spotwarp_fs.core.errors import SpotwarpError

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import MountReport
    from spotwarp_fs.cli.sources import LoadedSettings

SIGNAL_BASE: Final = 128


def run(loaded: LoadedSettings, wish: RunWish) -> int:
    """Run the command in its workspace; gives the exit code, or raises SpotwarpError before the command was started."""
    workspace = Path(os.path.realpath(wish.workspace))
    refuse_nested(os.environ, workspace, loaded.settings.state_dir)
    command = command_of(wish, workspace)
    check_before(command, wish, workspace)
    form, why = forms.choose(loaded, wish)
    say(f"workspace {form.path} ({form.name}: {why})")
    adopt_orphans()
    with stop_raises():
        try:
            name = workspace_of(loaded.settings, form.path)
            report = open_when_free(form, loaded, name, takeover=wish.takeover, wait=wish.wait)
        except StopRequested as stop:
            say("asked to stop before the command was started")
            return SIGNAL_BASE + stop.number
        try:
            _announce(report)
            return _with_workspace(loaded, wish, form, command, report)
        except StopRequested as stop:
            _leave(form, loaded.settings.notice_timeout)
            return SIGNAL_BASE + stop.number
        except BaseException:
            _leave(form, loaded.settings.notice_timeout)
            raise


def _announce(report: MountReport) -> None:
    from spotwarp_fs.cli.mount import summary

    for line in summary(report).splitlines():
        say(line)
    for line in report.left_out:
        say(f"left out: {line}")
    for line in report.notes:
        say(line)


def _leave(form: Form, timeout_s: float) -> None:
    """Close what was opened for a command that did not run to its end."""
    try:
        form.close(timeout_s=timeout_s, on_progress=lambda values: None)
    except SpotwarpError as error:
        say(f"error: {form.path} is still served: {error}")


def _with_workspace(loaded: LoadedSettings, wish: RunWish, form: Form, command: Command, report: MountReport) -> int:
    """Everything between the workspace's opening and its closing, which is done here too."""
    check_now(command, wish)
    settings = loaded.settings
    environment = environment_of(os.environ, loaded, form.path, wish.checkpoint_path, report.resumed_from)
    _make_directory(wish.checkpoint_path)
    about = record(form, command, environment, resumed=report.resumed_from is not None)
    terminal = Terminal()

    def start(again: bool) -> Child:
        told = {**environment, "SPOTWARP_RESUMED": "1"} if again else environment
        try:
            child = Child(command.argv, command.directory, told, terminal)
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise NoCommand(
                f"{command.argv[0]} cannot be started in {command.directory}: {error.strerror}", code
            ) from error
        if wish.permit is not None:
            PermitFile(wish.permit).note("started", form=form.name)
        return child

    own = (settings.state_dir, cache_directory(settings, report.workspace))
    outside = Outside(form.path, own, command.argv, command.directory)
    bell = Bell()
    with bell.listening():
        outcome = Supervising(
            form, bell, start, lambda: note(form, about), outside, notice_s=settings.notice_timeout
        ).run()
        deadline_s = outcome.deadline_s or time.monotonic() + settings.drain_timeout
        # One that was stopped, or failed, may have left half a checkpoint with every file closed.
        complete = outcome.code == 0 and outcome.deadline_s is None
        ended = publish_rest(
            form, bell, deadline_s=deadline_s, notice_s=settings.notice_timeout, complete=complete
        )  # fmt: skip
        if wish.permit is not None:
            PermitFile(wish.permit).note("ended", saved=ended.report is not None and ended.report.saved)
        return exit_code(outcome.code, ended, fenced=outcome.fenced)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"warning: the checkpoint directory {path} cannot be made: {error.strerror}")
