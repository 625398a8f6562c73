"""The edge of each command: an error of the provisioner becomes a message and an exit code, its nursery's groups too.

Invariant: nothing but click's own errors, the filesystem's and Ctrl-C leaves a command; what nobody foresaw passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

import click

from provisioner.core.errors import (
    BadWish,
    LedgerCorrupt,
    NoCredit,
    ProviderDenied,
    ProvisionerError,
    StoreDenied,
    StoreUnavailable,
)
from spotwarp_fs.api import ExitCode

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

_CODES: Final[tuple[tuple[type[ProvisionerError], ExitCode], ...]] = (
    (BadWish, ExitCode.USAGE),
    (ProviderDenied, ExitCode.CONFIG),
    (NoCredit, ExitCode.CONFIG),
    (StoreDenied, ExitCode.STORE_DENIED),
    (StoreUnavailable, ExitCode.STORE_UNREACHABLE),
    (LedgerCorrupt, ExitCode.CORRUPT),
)


class Stopped(click.ClickException):
    """Ends a command with a message and a code."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click reads it from the instance


def code_of(error: ProvisionerError) -> ExitCode:
    """Return the exit code that says what kind of error it was."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


def at_the_edge(command: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Wrap a command's function."""

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            return command(*args, **kwargs)
        except ProvisionerError as error:
            raise Stopped(str(error), code_of(error)) from error
        except BaseExceptionGroup as group:
            known = next((leaf for leaf in leaves(group) if isinstance(leaf, ProvisionerError)), None)
            if known is None:
                raise
            raise Stopped(str(known), code_of(known)) from group

    return wrapped


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what a group of groups holds."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
