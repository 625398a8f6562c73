"""Reasons to leave a node that is well before it goes by itself: its contract ends, or its account runs dry.

Invariant: nothing here waits; what an account has left comes as a message. A reason that led to no move is given again
after a while, not at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from provisioner.core.errors import ProvisionerError
from provisioner.core.intents import IntentRecord
from provisioner.core.ports import Instance
from provisioner.engine.eyes import Funds
from provisioner.engine.racing import Kit

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Leave:
    """Why a node is to be left, and where the next one may not be."""

    why: str
    avoid: str = ""
    """A provider that cannot be paid any more; empty = none."""
    lasts_s_min: float = 0.0
    """How long the next one's contract has to last."""


class Leaving:
    """Watches contract and account of the node that holds the workspace."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._settings = kit.ports.settings
        self._again_at_s = self._ask_at_s = float("-inf")
        self._funds_usd: dict[str, float] = {}
        self._warned: set[str] = set()

    def told(self, provider: str, usd: float) -> None:
        """An account was asked what it has left."""
        self._funds_usd[provider] = usd

    def tried(self) -> None:
        """A move began for such a reason: if it fails, the next one waits."""
        self._again_at_s = self._kit.now_s() + self._settings.cheaper_s

    def reason(self, record: IntentRecord, instance: Instance | None) -> Leave | None:
        """Say why to leave the node of *record*, as its provider showed it last; None for no reason."""
        now_s = self._kit.now_s()
        self._ask(record.intent.provider, now_s)
        if now_s < self._again_at_s:
            return None
        return self._contract(instance, now_s) or self._account(record)

    def _contract(self, instance: Instance | None, now_s: float) -> Leave | None:
        ends_at_s = None if instance is None else instance.contract_ends_at_s
        lead_s = self._settings.contract_lead_s
        if ends_at_s is None or ends_at_s - now_s > lead_s:
            return None
        left_min = max(0.0, ends_at_s - now_s) / MINUTE_S
        return Leave(f"its contract ends in {left_min:.0f} min", lasts_s_min=2 * lead_s)

    def _account(self, record: IntentRecord) -> Leave | None:
        provider, usd_h = record.intent.provider, record.intent.usd_h
        usd = self._funds_usd.get(provider)
        if usd is None or usd_h <= 0 or usd / usd_h * 3600 > self._settings.funds_lead_s:
            self._warned.discard(provider)
            return None
        why = f"{provider}: the account's ${max(usd, 0.0):.2f} last {max(usd, 0.0) / usd_h * 60:.0f} min of this node"
        if len(self._kit.spec.providers) > 1:
            return Leave(why, avoid=provider)
        if provider not in self._warned:
            self._warned.add(provider)
            self._kit.say(f"{why}, and the job may use no other provider: add credit")
        return None

    def _ask(self, provider: str, now_s: float) -> None:
        """Ask the account now and then, in a task of its own."""
        if now_s >= self._ask_at_s:
            self._ask_at_s = now_s + self._settings.funds_s
            self._kit.nursery.start_soon(self._read, provider)

    async def _read(self, provider: str) -> None:
        account = self._kit.accounts.get(provider)
        if account is None:
            return
        usd = None
        with trio.move_on_after(self._settings.search_s):
            try:
                usd = await account.provider.balance_usd()
            except ProvisionerError as error:
                self._kit.say(f"what the account has left is not known: {error}")
        if usd is not None:
            await self._kit.send(Funds(provider, usd))
