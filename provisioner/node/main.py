"""The agent's entry: read the errand and the job's spec, work, and end with the code that the start script waits for.

Invariant: a store that does not answer yet is waited for, since the dead-man switch ends a node that nobody needs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import trio

from provisioner.core import rendezvous
from provisioner.core.bootstrap import EXIT_FENCED
from provisioner.core.errors import ProvisionerError, StoreDenied, StoreUnavailable
from provisioner.core.jobs import JobSpec, decode_spec
from provisioner.core.rendezvous import Report
from provisioner.meeting import StoreShelf, StoreWorkspace
from provisioner.node.agent import Agent, first_report
from provisioner.node.deciding import EXIT_UNFIT
from provisioner.node.errand import Errand, choose_place, read_errand
from provisioner.system import SystemClock, SystemEntropy
from spotwarp_fs import api

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
T = TypeVar("T")


def main(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run the agent; gives its exit code."""
    parser = argparse.ArgumentParser(prog="node.py", description="The agent of a rented node.")
    parser.add_argument("what", choices=["run"])
    parser.add_argument("--job", required=True, help="Name of the job in the store.")
    given = parser.parse_args(list(arguments))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        errand = read_errand(given.job, os.environ if environ is None else environ)
        errand.home.mkdir(parents=True, exist_ok=True)
        settings = api.load_settings(environ=errand.run_environment).settings
        return trio.run(_work, errand, settings)
    except (ProvisionerError, api.SpotwarpError) as error:
        log.error("%s", error)
        return EXIT_UNFIT


async def _work(errand: Errand, settings: api.Settings) -> int:
    store = api.Store(settings)
    clock = SystemClock()
    try:
        shelf = StoreShelf(store)
        spec = await _spec(shelf, errand)
        report = first_report(errand, await _report(shelf, errand), clock.now_s())
        if report is None:
            log.info("an earlier start of this node has ended it")
            return EXIT_FENCED
        # A permit of an earlier start says nothing about this one.
        errand.permit.unlink(missing_ok=True)
        view = StoreWorkspace(store, spec.workspace)
        agent = Agent(errand, spec, shelf, view, settings, choose_place(errand), clock, SystemEntropy())
        return await agent.run(report)
    finally:
        await store.aclose()


async def _spec(shelf: StoreShelf, errand: Errand) -> JobSpec:
    while (body := await _patiently(shelf, rendezvous.spec_key(errand.job))) is None:
        log.warning("the store has no job %s yet", errand.job)
        await trio.sleep(WAIT_S)
    return decode_spec(body)


async def _report(shelf: StoreShelf, errand: Errand) -> Report | None:
    body = await _patiently(shelf, rendezvous.report_key(errand.job, errand.ident))
    return None if body is None else rendezvous.decode(Report, body)


async def _patiently(shelf: StoreShelf, key: str) -> bytes | None:
    while True:
        try:
            return await shelf.get(key)
        except (StoreUnavailable, StoreDenied) as error:
            log.warning("not read key=%s reason=%s", key, error)
            await trio.sleep(WAIT_S)
