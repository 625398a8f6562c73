"""Is a lease waited for as long as it lasts, and no longer than it may be?"""

from __future__ import annotations

from typing import Any

import pytest

from spotwarp_fs.cli.running import patience
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.types import WriterEpoch
from spotwarp_fs.engine.heartbeat import Beat, Writer
from spotwarp_fs.engine.settings import EngineSettings

LEASE_S = EngineSettings().lease_s


def beat(age_s: float) -> Beat:
    return Beat(WriterEpoch(1), "session", Writer("elsewhere", 7, "/w", 0.0), age_s)


class Busy:
    """A form that opens once the lease is over."""

    def __init__(self, refusals: int, message: str = "the workspace is being written by elsewhere") -> None:
        self.refusals = refusals
        self.message = message
        self.tries = 0

    def open(self, *, takeover: bool) -> str:
        self.tries += 1
        if self.tries <= self.refusals:
            raise UserError(self.message, ExitCode.LIVE_WRITER)
        return "served"


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[Beat | None]:
    """What the store says of the lease, look by look; the last word stays."""
    said: list[Beat | None] = []
    monkeypatch.setattr(patience, "lease_of", lambda loaded, name: said.pop(0) if len(said) > 1 else said[0])
    monkeypatch.setattr(patience, "LOOK_PERIOD_S", 0.05)
    monkeypatch.setattr(patience, "MARGIN_S", 0.01)
    return said


def wait(form: Any, *, may_wait: bool = True) -> Any:
    return patience.open_when_free(form, None, "run7", takeover=False, wait=may_wait)  # type: ignore[arg-type]


def test_it_counts_down_and_goes_on(leases: list[Beat | None], capsys: pytest.CaptureFixture[str]) -> None:
    leases += [beat(LEASE_S - 0.2), beat(LEASE_S - 0.1), beat(LEASE_S + 1)]
    form = Busy(1)
    assert wait(form) == "served"
    assert form.tries == 2
    assert "elsewhere (pid 7, /w); taking over in" in capsys.readouterr().err


def test_a_lease_that_is_given_back_is_not_waited_for(leases: list[Beat | None]) -> None:
    leases += [beat(0.0), None]
    assert wait(Busy(1)) == "served"


def test_a_writer_that_lives_on_is_waited_for_and_named(
    leases: list[Beat | None], capsys: pytest.CaptureFixture[str]
) -> None:
    leases += [beat(5.0), beat(1.0), beat(6.0), beat(1.0), None]
    assert wait(Busy(1)) == "served"
    assert capsys.readouterr().err.count("elsewhere still writes to run7") == 1


def test_who_may_not_wait_does_not(leases: list[Beat | None]) -> None:
    leases += [beat(0.0)]
    form = Busy(1)
    with pytest.raises(UserError) as caught:
        wait(form, may_wait=False)
    assert caught.value.exit_code == ExitCode.LIVE_WRITER
    assert form.tries == 1


def test_a_mount_of_this_machine_is_no_lease(leases: list[Beat | None]) -> None:
    leases += [None]
    with pytest.raises(UserError, match="another mount"):
        wait(Busy(1, "the cache directory /c serves another mount: /w"))
