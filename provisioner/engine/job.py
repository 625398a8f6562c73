"""Run one job from here: take control of it, recover what an earlier controller left, and decide until it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from provisioner.core.errors import BadWish, ProviderDenied, ProvisionerError, RateLimited
from provisioner.core.happenings import JobEnd, Observer, Said
from provisioner.core.intents import label_of
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Fuse
from provisioner.core.ports import Capabilities, DeadMan, WorkspaceHead
from provisioner.engine.accounts import Account
from provisioner.engine.books import Books
from provisioner.engine.eyes import Eyes, Message, Showed, Told
from provisioner.engine.fencing import Fence, answered
from provisioner.engine.keeper import Keeper
from provisioner.engine.outbox import Outbox
from provisioner.engine.ports import EnginePorts
from provisioner.engine.racing import Kit

INBOX_MAX: Final = 100
CHANGES_S: Final = 1.0
DENIED_PAUSE_S: Final = 60.0
FAREWELL_S: Final = 30.0
"""How long the last records may take into the mirror; the ledger has them."""
UNKNOWN_CAPABILITIES: Final = Capabilities(
    spot=False,
    rebid=False,
    stop_start=False,
    dead_man=DeadMan.NONE,
    fuse=Fuse.UNKNOWN,
    label_chars_max=100,
    script_bytes_max=4000,
    visible_after_s=60.0,
    create_gap_s=5.0,
    list_gap_s=5.0,
)
"""Of a provider that does not say: its instances may exist, so its listings are still needed."""


async def run_job(spec: JobSpec, ports: EnginePorts, observe: Observer) -> JobEnd:
    """Keep *spec*'s command running until it ends, and leave nothing that costs money.

    Raises ControllerAlive when another controller lives (unless `settings.adopt`), Superseded when one with a higher
    number has taken over, StoreUnavailable when the store does not answer at the start, StoreDenied, LedgerCorrupt and
    BadWish. Cancelled, it leaves everything as it is, and the next call goes on from there, on this machine or another.
    """
    _check(spec, ports)
    fence = Fence(spec.job, ports)
    await fence.take()
    try:
        return await _controlled(spec, ports, observe, fence)
    except BaseExceptionGroup as group:
        ours, others = group.split(ProvisionerError)
        if ours is None or others is not None:
            raise
        # Tasks end together with the first that cannot go on; the caller hears its reason, not a group of one.
        raise _first(ours) from None


def _check(spec: JobSpec, ports: EnginePorts) -> None:
    label_of(spec.job, "00000000", 1)
    missing = [name for name in spec.providers if name not in ports.providers]
    if missing or not spec.providers:
        known = ", ".join(sorted(ports.providers)) or "none"
        raise BadWish(f"job {spec.job}: no account for {', '.join(missing) or 'any provider'}; there are: {known}")


def _first(group: BaseExceptionGroup[ProvisionerError]) -> ProvisionerError:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("a group of nothing")


async def _controlled(spec: JobSpec, ports: EnginePorts, observe: Observer, fence: Fence) -> JobEnd:
    sender, receiver = trio.open_memory_channel[Message](INBOX_MAX)

    def say(text: str) -> None:
        observe(Said(ports.clock.now_s(), text))

    outbox = Outbox(ports.shelf, ports.settings, say)
    books = Books(spec, ports, outbox)
    eyes = Eyes(spec.job, ports, sender.send)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fence.beat)
        nursery.start_soon(outbox.run)
        await books.recover()
        rented = [record.intent.provider for record in books.unsettled()]
        accounts = await _accounts(spec, ports, rented, say)
        head = await answered(ports.settings, ports.workspace.head)
        kit = Kit(spec, ports, accounts, books, outbox, fence, eyes, sender.send, observe, nursery)
        end = await _decided(kit, head, receiver)
        with trio.move_on_after(FAREWELL_S):
            await kit.forget_request()
            await outbox.emptied()
            await fence.leave()
        nursery.cancel_scope.cancel()
    return end


async def _decided(kit: Kit, head: WorkspaceHead | None, inbox: trio.MemoryReceiveChannel[Message]) -> JobEnd:
    """Hear messages until the job has ended."""
    keeper = Keeper(kit, head)
    holder = None if head is None else head.intent
    keeper.recover(None if holder is None else await kit.eyes.report(holder))
    for task in (kit.eyes.watch_heartbeat, kit.eyes.watch_head, kit.eyes.watch_reports, kit.eyes.watch_requests):
        kit.nursery.start_soon(task)
    for account in kit.accounts.values():
        kit.nursery.start_soon(_poll, kit, keeper, account)
    while keeper.end is None:
        message: Message | None = None
        with trio.move_on_after(max(0.0, keeper.wake_in_s())):
            message = await inbox.receive()
        if message is None:
            keeper.wake()
        else:
            keeper.hear(message)
    return keeper.end


async def _accounts(
    spec: JobSpec, ports: EnginePorts, rented: Iterable[str], say: Callable[[str], None]
) -> dict[str, Account]:
    """Ask each provider what it can do; those where something is still *rented* stay under watch as well."""
    accounts: dict[str, Account] = {}

    async def ask(name: str) -> None:
        provider, capabilities = ports.providers[name], UNKNOWN_CAPABILITIES
        with trio.move_on_after(ports.settings.call_s):
            try:
                capabilities = await provider.capabilities()
            except ProvisionerError as error:
                say(str(error))
        accounts[name] = Account(provider, capabilities, ports)

    names = list(dict.fromkeys([*spec.providers, *(name for name in rented if name in ports.providers)]))
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(ask, name)
    return {name: accounts[name] for name in names}


async def _poll(kit: Kit, keeper: Keeper, account: Account) -> None:
    """List one account's instances as often as the keeper needs it, until cancelled."""
    told = ""
    while True:
        began_s = trio.current_time()
        pause_s = 0.0
        try:
            # What another job on this machine got within half of this job's own gap is as good.
            wanted_s = keeper.listing_gap_s(account.name) / 2
            listing = await account.listing(max(account.capabilities.list_gap_s, wanted_s))
        except ProvisionerError as error:
            pause_s = DENIED_PAUSE_S if isinstance(error, ProviderDenied) else account.capabilities.list_gap_s
            if isinstance(error, RateLimited) and error.retry_after_s is not None:
                pause_s = error.retry_after_s
            if str(error) != told:
                told = str(error)
                await kit.send(Told(told))
        else:
            await kit.send(Showed(account.name, listing))
        while True:
            gap_s = max(account.capabilities.list_gap_s, keeper.listing_gap_s(account.name), pause_s)
            left_s = began_s + gap_s - trio.current_time()
            if left_s <= 0:
                break
            # What is needed may change while it waits.
            await trio.sleep(min(left_s, CHANGES_S))
