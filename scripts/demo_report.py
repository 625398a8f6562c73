"""What the demo found out: the timeline while it happens, the figures, the verdict, and the JSON document.

Invariant: `ok` is true only if every check was made and held; a demo that stopped halfway reports what it knows.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass
class Figures:
    """What is measured; None = the demo did not get that far. With several losses: of the first one."""

    bit_identical: bool | None = None
    killed_in_mid_save: bool | None = None
    log_is_prefix: bool | None = None
    kill_step: int | None = None
    resumed_step: int | None = None
    steps_lost: int | None = None
    seconds_lost: float | None = None
    mount_s: float | None = None
    first_read_s: float | None = None
    rto_s: float | None = None
    bytes_fetched: int | None = None
    bytes_stored: int | None = None
    bytes_logical: int | None = None


@dataclass
class Report:
    """The demo's story so far, printed line by line."""

    console: Console
    began_s: float = field(default_factory=time.monotonic)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    failovers: list[dict[str, Any]] = field(default_factory=list)
    """Each loss, phase by phase, in seconds from the kill."""
    errors: list[str] = field(default_factory=list)
    is_complete: bool = False

    def mark(self, event: str, text: str, at_s: float | None = None) -> None:
        """Note that *event* happened (now, or at *at_s* on the monotonic clock) and show it."""
        t_s = round((time.monotonic() if at_s is None else at_s) - self.began_s, 3)
        self.timeline.append({"t_s": t_s, "event": event, "text": text})
        self.console.print(f"[dim]{t_s:8.2f} s[/]  [bold]{event:<10}[/]", end="  ")
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def check(self, otherwise: str, *, holds: bool) -> bool:
        """Note *otherwise* as what is wrong unless *holds*."""
        if not holds:
            self.errors.append(otherwise)
        return holds

    @property
    def ok(self) -> bool:
        return self.is_complete and not self.errors

    def show(self) -> None:
        table = Table(title="What the loss of a node costs", title_justify="left", show_header=False)
        for name, value in asdict(self.figures).items():
            table.add_row(name, "not reached" if value is None else readable(name, value))
        self.console.print(table)
        if self.failovers:
            self.console.print(self._phases())
        for error in self.errors:
            self.console.print(f"wrong: {error}", style="bold red", markup=False, soft_wrap=True)
        verdict = "the final weights are bit-identical to the uninterrupted run" if self.ok else "the demo FAILED"
        self.console.print(verdict, style="bold green" if self.ok else "bold red")

    def _phases(self) -> Table:
        table = Table(title="From the kill on, by failover", title_justify="left", show_header=False)
        for name in self.failovers[0]:
            values = [failover[name] for failover in self.failovers]
            table.add_row(name, *("–" if value is None else readable(name, value) for value in values))
        return table

    def to_json(self) -> str:
        figures = asdict(self.figures)
        document = {
            "ok": self.ok,
            **figures,
            "failovers": self.failovers,
            "errors": self.errors,
            "timeline": self.timeline,
        }
        return json.dumps(document)


def readable(name: str, value: float | int | bool | str) -> str:
    if name.startswith("bytes_") and not isinstance(value, str):
        return f"{value / 1e6:.1f} MB"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f} s" if isinstance(value, float) else str(value)
