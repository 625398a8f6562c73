"""Who gets a machine's GPUs: on-demand rentals first, in their order, then bids, the highest first.

One rule gives the whole life of an interruptible rental (providers.md 1.7): a higher bid or an on-demand rental takes
its GPUs, and it goes on by itself once it has priority again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OUTBID_STEP = 0.001
"""Dollars per GPU-hour by which a bid has to exceed its rival's: Vast's smallest price (providers.md 1.3)."""


@dataclass(slots=True)
class Claim:
    """A wish for some of a machine's GPUs, by an instance or by somebody else."""

    gpus: int
    bid: float | None
    """Dollars per GPU-hour; None is on-demand, which nobody can outbid."""
    since: float
    holder: str | None = None
    """The instance's key; None is another customer."""


def _rank(claim: Claim) -> tuple[int, float, float]:
    if claim.bid is None:
        return (0, 0.0, claim.since)
    return (1, -claim.bid, claim.since)


def granted(capacity: int, claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims that are served, by rank; one that does not fit is passed over.

    >>> mine, rival = Claim(1, 0.20, 1.0, "mine"), Claim(1, 0.30, 2.0)
    >>> granted(1, [mine, rival]) == [rival]
    True
    """
    served, free = [], capacity
    for claim in sorted(claims, key=_rank):
        if claim.gpus <= free:
            served.append(claim)
            free -= claim.gpus
    return served


def min_bid(capacity: int, claims: Sequence[Claim], *, gpus: int, floor: float) -> float | None:
    """Return the lowest bid per GPU that would be served at once, or None where on-demand rentals leave no room."""
    prices = {floor} | {claim.bid + OUTBID_STEP for claim in claims if claim.bid is not None and claim.bid >= floor}
    for price in sorted(prices):
        probe = Claim(gpus, price, float("inf"))
        if any(claim is probe for claim in granted(capacity, [*claims, probe])):
            return round(price, 6)
    return None


def room_on_demand(capacity: int, claims: Iterable[Claim]) -> int:
    """Return how many GPUs a new on-demand rental can have: all but those rented on-demand."""
    return capacity - sum(claim.gpus for claim in granted(capacity, claims) if claim.bid is None)
