"""The billing ledger: what each rental has cost so far, kept apart into GPU, storage and traffic.

Vast bills storage from creation and the GPU while it runs; RunPod bills from creation until stopped or terminated
(providers.md 1.4, 2.3 and 7.4). The ledger only knows rates and when they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SECONDS_PER_HOUR = 3600.0


@dataclass(slots=True)
class Account:
    """One rental's bill. Rates are dollars per hour, sums are dollars up to `since`."""

    key: str
    provider: str
    owner: str
    label: str
    opened_at: float
    since: float
    gpu_rate: float = 0.0
    storage_rate: float = 0.0
    gpu: float = 0.0
    storage: float = 0.0
    traffic: float = 0.0
    closed_at: float | None = None
    changes: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, GPU rate, storage rate) of each change."""

    def settle(self, now: float) -> None:
        """Add what has accrued by *now*."""
        assert now >= self.since, f"{self.key} was settled at {self.since}, and time went back to {now}"
        hours = (now - self.since) / SECONDS_PER_HOUR
        self.gpu += self.gpu_rate * hours
        self.storage += self.storage_rate * hours
        self.since = now

    def total(self) -> float:
        """Return the dollars up to the last settling."""
        return self.gpu + self.storage + self.traffic


class Ledger:
    """All bills, by instance key."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def open(self, account: Account) -> None:
        """Begin a bill; one instance has one."""
        assert account.key not in self._accounts, f"{account.key} already has a bill"
        self._accounts[account.key] = account

    def set_rates(self, key: str, now: float, *, gpu: float, storage: float) -> None:
        """Charge these rates from *now* on."""
        account = self._accounts[key]
        account.settle(now)
        if (gpu, storage) != (account.gpu_rate, account.storage_rate):
            account.gpu_rate, account.storage_rate = gpu, storage
            account.changes.append((now, gpu, storage))

    def close(self, key: str, now: float) -> None:
        """End the bill."""
        self.set_rates(key, now, gpu=0.0, storage=0.0)
        self._accounts[key].closed_at = now

    def add_traffic(self, key: str, dollars: float) -> None:
        """Charge bytes that were sent or received."""
        self._accounts[key].traffic += dollars

    def spent_by(self, owner: str, now: float) -> float:
        """Return the dollars that *owner* owes by *now*."""
        return sum(account.total() for account in self.settled(now) if account.owner == owner)

    def settled(self, now: float) -> Iterator[Account]:
        """Yield every bill, brought up to *now*."""
        for account in self._accounts.values():
            account.settle(max(now, account.since))
            yield account

    def of(self, key: str, now: float) -> Account:
        """Return one bill, brought up to *now*."""
        account = self._accounts[key]
        account.settle(max(now, account.since))
        return account

    def report(self, now: float) -> list[dict[str, Any]]:
        """Return every bill as the oracle shows it."""
        return [
            {
                "key": account.key,
                "provider": account.provider,
                "owner": account.owner,
                "label": account.label,
                "opened_at": account.opened_at,
                "closed_at": account.closed_at,
                "billing": account.closed_at is None,
                "gpu_rate": account.gpu_rate,
                "storage_rate": account.storage_rate,
                "gpu": round(account.gpu, 8),
                "storage": round(account.storage, 8),
                "traffic": round(account.traffic, 8),
                "total": round(account.total(), 8),
                "changes": account.changes,
            }
            for account in self.settled(now)
        ]
