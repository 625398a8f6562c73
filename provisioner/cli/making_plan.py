"""Gather what a plan needs, all at once: the market, the workspace's history, the directory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from provisioner.cli.accounts import Here, make_providers
from provisioner.cli.looking import look
from provisioner.cli.market import Found, search_all
from provisioner.cli.planning import Plan, make_plan, traffic_of
from provisioner.cli.wishing import Ordered
from provisioner.cli.workload import Asked, Known, workload
from provisioner.core.ports import Provider
from provisioner.system import SystemClock, SystemEntropy
from spotwarp_fs.api import LoadedSettings, StateFacts, Store, Unavailable, parse_duration

STATES_ASKED: Final = 100
HISTORY_S: Final = 9.0
"""A plan does not wait longer for the store; without history it assumes."""


def here(loaded: LoadedSettings, environ: Mapping[str, str] | None = None) -> Here:
    """Describe this machine for the providers."""
    environment = os.environ if environ is None else environ
    return Here(environment, Path.home(), loaded.settings.state_dir, SystemClock(), SystemEntropy())


@asynccontextmanager
async def opened(providers: Mapping[str, Provider]) -> AsyncIterator[Mapping[str, Provider]]:
    """Close *providers* in the end."""
    try:
        yield providers
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            for provider in providers.values():
                await provider.aclose()


async def gather(order: Ordered, providers: Mapping[str, Provider]) -> Plan:
    """Ask the market and the store, look through the directory, and make the plan."""
    settings = order.loaded.settings
    states: list[StateFacts] = []
    found: list[Found] = []
    problems: list[str] = []

    async def ask_market() -> None:
        found.append(await search_all(providers, order.spec.wish, order.spec.bid_usd_h))

    async def ask_store() -> None:
        history, problem = await _history(order)
        states.extend(history)
        problems.extend([problem] if problem else [])

    asked = Asked(order.checkpoint_gb, order.checkpoint_every_s, parse_duration(order.spec.interval))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_market)
        nursery.start_soon(ask_store)
        if order.directory is not None:
            protection, saved = await trio.to_thread.run_sync(look, order.directory, settings)
            asked = replace(asked, directory=str(order.directory), protection=protection, saved=saved)
    known: Known = workload(asked, states)
    # Bandwidth counts in every price, so what the job moves is part of the wish from here on.
    spec = replace(order.spec, wish=replace(order.spec.wish, traffic=traffic_of(known)))
    plan = make_plan(
        spec, known, found[0], now_s=SystemClock().now_s(),
        store=settings.store_url(), endpoint=settings.s3.endpoint or "",
    )  # fmt: skip
    return replace(plan, warnings=(*plan.warnings, *problems))


async def _history(order: Ordered) -> tuple[Sequence[StateFacts], str]:
    """Return the workspace's newest states, or none and why the store could not be asked."""
    store = Store(order.loaded.settings)
    try:
        with trio.move_on_after(HISTORY_S):
            return await store.states(order.spec.workspace, STATES_ASKED), ""
        return (), f"the store {store.url} did not answer within {HISTORY_S:g} s: its history does not count here"
    except Unavailable as error:
        return (), f"the store does not answer ({error}): its history does not count here"
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await store.aclose()


async def plan_of(order: Ordered) -> Plan:
    """Make the plan with providers of its own."""
    async with opened(make_providers(order.spec.providers, here(order.loaded))) as providers:
        return await gather(order, providers)
