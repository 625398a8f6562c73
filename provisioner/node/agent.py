"""The agent's shell: what happens becomes events, what is decided is carried out, and the store hears of it.

Invariant: one task decides, the others only tell it; an unreachable store delays words and stops nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, assert_never

import trio

from provisioner.core import rendezvous
from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.jobs import JobSpec
from provisioner.core.ports import Clock, Entropy, Shelf, WorkspaceView
from provisioner.core.rendezvous import BadMessage, Controller, NodePhase, Orders, Report
from provisioner.node import checks, deciding
from provisioner.node.deciding import (
    Command,
    Event,
    Failed,
    GivePermit,
    Looked,
    Node,
    Notified,
    Ordered,
    Rules,
    RunEnded,
    StartRun,
    StopRun,
    Sync,
    Synced,
    Tick,
)
from provisioner.node.errand import Errand
from provisioner.node.running import NOTES, RunProcess, Tail, event_of, read_note, run_arguments
from spotwarp_fs import api

log = logging.getLogger(__name__)

ORDERS_PERIOD_S: Final = 1.0
NOTES_PERIOD_S: Final = 0.2
LOOK_PERIOD_S: Final = 3.0
TICK_S: Final = 0.5
LOG_PERIOD_S: Final = 5.0
ALIVE_PERIOD_S: Final = 5.0
RETRY_S: Final = 1.0
STORE_CHECK_TRIES: Final = 5
SYNC_TIMEOUT_S: Final = 600.0
LAST_WORD_S: Final = 120.0
"""So long the last report and the last log are tried to be brought to the store."""
CHECKPOINT_ENTRIES_MAX: Final = 20_000
CHECKPOINT_DEPTH_MAX: Final = 3
OVER: Final = (NodePhase.ENDED, NodePhase.UNFIT)


class Agent:
    """One agent, from its start to its exit code."""

    def __init__(
        self,
        errand: Errand,
        spec: JobSpec,
        shelf: Shelf,
        view: WorkspaceView,
        settings: api.Settings,
        place: Path,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._errand, self._spec, self._shelf, self._view = errand, spec, shelf, view
        self._settings, self._place, self._clock, self._entropy = settings, place, clock, entropy
        self._tail = Tail(tuple(errand.secrets))
        self._told, self._heard = trio.open_memory_channel[Event](1000)
        self._run: RunProcess | None = None
        self._node: Node | None = None
        self._news = trio.Event()
        self._reported = self._logged = -1

    async def run(self, report: Report) -> int:
        """Work until there is nothing left to do; gives the exit code. *report* is the first one."""
        self._node, commands = deciding.begin(Rules(self._spec.limits.crashes_max), report)
        async with trio.open_nursery() as nursery:
            for task in (
                self._check_gpus, self._check_store, self._read_notes, self._read_orders, self._look, self._tick,
                self._hear_signals, self._stay_alive, self._upload,
            ):  # fmt: skip
                nursery.start_soon(task)
            self._carry_out(commands, nursery)
            while self._node.exit is None:
                event = await self._heard.receive()
                before, (self._node, commands) = self._node, deciding.turn(self._node, event, self._clock.now_s())
                if self._node.report.phase is not before.report.phase:
                    log.info("phase=%s why=%s", self._node.report.phase.value, self._node.report.why)
                self._carry_out(commands, nursery)
                self._news.set()
            nursery.cancel_scope.cancel()
        with trio.move_on_after(LAST_WORD_S):
            await self._say_all()
        return self._node.exit

    def _tell(self, event: Event) -> None:
        with suppress(trio.WouldBlock):
            self._told.send_nowait(event)

    def _carry_out(self, commands: tuple[Command, ...], nursery: trio.Nursery) -> None:
        for command in commands:
            match command:
                case StartRun(publish_only):
                    arguments = run_arguments(self._errand, self._spec, self._place, publish_only=publish_only)
                    self._run = RunProcess(self._errand, arguments, self._tail)
                    nursery.start_soon(self._wait_for, self._run)
                case GivePermit(writer_epoch):
                    draft = self._errand.permit.with_suffix(".tmp")
                    draft.write_text(f"{writer_epoch}\n")
                    draft.replace(self._errand.permit)
                case Sync():
                    nursery.start_soon(self._sync)
                case StopRun(kill):
                    if self._run is not None:
                        self._run.stop(kill=kill)
                case _:
                    assert_never(command)

    async def _wait_for(self, run: RunProcess) -> None:
        code = await run.ended(_pass_on)
        run.close()
        self._look_at_notes()  # the last of them count before the end does
        await self._told.send(RunEnded(code, run.saved(), self._tail.last_words()))

    # What happens here.

    async def _check_gpus(self) -> None:
        self._tell(await checks.check_gpus(self._spec, self._errand.run_environment))

    async def _check_store(self) -> None:
        payload = self._entropy.token_bytes(checks.PROBE_BYTES)
        for attempt in range(1, STORE_CHECK_TRIES + 1):
            try:
                self._tell(await checks.check_store(self._spec, self._shelf, self._errand.ident, payload))
                return
            except (StoreUnavailable, StoreDenied) as error:
                if attempt == STORE_CHECK_TRIES:
                    self._tell(Failed("store", f"the store cannot be written and read: {error}"))
                await trio.sleep(RETRY_S * attempt)

    async def _read_notes(self) -> None:
        self._seen: dict[str, float] = {}
        while True:
            self._look_at_notes()
            await trio.sleep(NOTES_PERIOD_S)

    def _look_at_notes(self) -> None:
        for name in NOTES:
            note = read_note(self._errand.permit, name)
            if note is not None and note["at_s"] != self._seen.get(name):
                self._seen[name] = note["at_s"]
                self._tell(event_of(name, note))

    async def _tick(self) -> None:
        while True:
            self._tell(Tick())
            await trio.sleep(TICK_S)

    async def _hear_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                self._tell(Notified(self._settings.notice_timeout))

    async def _stay_alive(self) -> None:
        """Touch the dead-man switch's file while the command lives or a controller does."""
        controller: tuple[int, int] | None = None
        while True:
            found = await self._read(rendezvous.alive_key(self._spec.job), Controller)
            moved = found is not None and (found.controller_epoch, found.seq) != controller
            controller = (found.controller_epoch, found.seq) if found is not None else controller
            assert self._node is not None
            if moved or (self._node.running and self._node.holds):
                with suppress(OSError):
                    self._errand.alive.touch()
            await trio.sleep(ALIVE_PERIOD_S)

    # What the controller and the store say.

    async def _read_orders(self) -> None:
        key = rendezvous.orders_key(self._spec.job, self._errand.ident)
        while True:
            orders = await self._read(key, Orders)
            if orders is not None:
                self._tell(Ordered(orders))
            await trio.sleep(ORDERS_PERIOD_S)

    async def _read(self, key: str, kind: type[rendezvous.Body]) -> rendezvous.Body | None:
        try:
            body = await self._shelf.get(key)
            return None if body is None else rendezvous.decode(kind, body)
        except (StoreUnavailable, StoreDenied, BadMessage) as error:
            log.warning("not read key=%s reason=%s", key, error)
            return None

    async def _look(self) -> None:
        """See how far the workspace is, while this node holds it."""
        while True:
            await trio.sleep(LOOK_PERIOD_S)
            if self._node is None or not (self._node.holds and self._node.running):
                continue
            try:
                head = await self._view.head()
            except (StoreUnavailable, StoreDenied):
                head = None
            ours = head is not None and head.intent == self._errand.ident
            content = await self._checkpoints()
            self._tell(
                Looked(head.number, head.quiescent, content) if head is not None and ours else Looked(0, False, content)
            )

    async def _checkpoints(self) -> str:
        directory = self._place / self._spec.checkpoint_path
        policies = self._settings.policies()

        def complete(name: str, is_directory: bool) -> bool:
            encoded = os.fsencode(name)
            return policies.is_atomic_dir(encoded) if is_directory else policies.is_atomic(encoded)

        return await trio.to_thread.run_sync(content_of, directory, complete, abandon_on_cancel=True)

    async def _sync(self) -> None:
        quiescent = False
        try:
            number = await api.sync(self._settings, str(self._place), SYNC_TIMEOUT_S)
            head = await self._view.head()
            quiescent = head is not None and head.quiescent and head.number >= number
        except (api.SpotwarpError, StoreUnavailable, StoreDenied) as error:
            log.warning("not everything is published yet: %s", error)
        self._tell(Synced(quiescent))

    # What the store is told.

    async def _upload(self) -> None:
        log_at_s = trio.current_time()
        while True:
            with trio.move_on_after(LOG_PERIOD_S):
                await self._news.wait()
            self._news = trio.Event()
            await self._unless_down(self._say)
            if trio.current_time() >= log_at_s:
                log_at_s = trio.current_time() + LOG_PERIOD_S
                await self._unless_down(self._say_log)

    async def _unless_down(self, say: Callable[[], Awaitable[None]]) -> None:
        try:
            await say()
        except (StoreUnavailable, StoreDenied) as error:
            log.warning("the store does not take our word: %s", error)
            await trio.sleep(RETRY_S)
            self._news.set()

    async def _say(self) -> None:
        assert self._node is not None
        report = self._node.report
        if report.seq != self._reported:
            await self._shelf.put(rendezvous.report_key(self._spec.job, self._errand.ident), rendezvous.encode(report))
            self._reported = report.seq

    async def _say_log(self) -> None:
        version = self._tail.version
        if version not in (0, self._logged):
            await self._shelf.put(rendezvous.log_key(self._spec.job, self._errand.ident), self._tail.text())
            self._logged = version

    async def _say_all(self) -> None:
        """The log first: whoever reads the last report may end this node."""
        for say in (self._say_log, self._say):
            while True:
                try:
                    await say()
                    break
                except (StoreUnavailable, StoreDenied) as error:
                    log.warning("the store does not take our last word: %s", error)
                    await trio.sleep(RETRY_S)


def content_of(directory: Path, complete: Callable[[str, bool], bool]) -> str:
    """Name what is in a checkpoint directory, so that another content has another name; empty for none."""
    found = sorted(_entries(directory, complete, CHECKPOINT_DEPTH_MAX))[:CHECKPOINT_ENTRIES_MAX]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else ""


def _entries(directory: Path, complete: Callable[[str, bool], bool], depth: int) -> Iterator[tuple[str, int, int]]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    is_directory = entry.is_dir(follow_symlinks=False)
                    if complete(entry.name, is_directory):
                        stat = entry.stat(follow_symlinks=False)
                        yield entry.path, stat.st_mtime_ns, 0 if is_directory else stat.st_size
                    if is_directory and depth > 1:
                        yield from _entries(Path(entry.path), complete, depth - 1)
    except OSError:
        return


def _pass_on(chunk: bytes) -> None:
    """Print on the container's own output, which providers show."""
    with suppress(OSError):
        os.write(1, chunk)


def first_report(errand: Errand, before: Report | None, now_s: float) -> Report | None:
    """Return the first report of this start; None when an earlier one has said that this node is done."""
    if before is not None and before.phase in OVER:
        return None
    return Report(
        ident=errand.ident,
        seq=1 if before is None else before.seq + 1,
        phase=NodePhase.BOOTED,
        instance_id=errand.instance_id,
        times={NodePhase.BOOTED.value: now_s},
        self_destruct=errand.self_destruct,
    )
