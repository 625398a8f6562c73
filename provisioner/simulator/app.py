"""The way of every request: arrival, caller, faults, limits, the market, faults again, departure.

The market itself never waits. All waiting (a slow network, the time that a create call takes, an answer that is late)
happens here, in virtual time, so that a handler is one step that nothing can interrupt.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from provisioner.simulator import faults as kinds
from provisioner.simulator.calls import SELF_ENDPOINTS, Call, FrontEnd
from provisioner.simulator.clock import FOREVER_S, SimClock
from provisioner.simulator.faults import Fault, Faults, Target
from provisioner.simulator.journal import Entry, Journal
from provisioner.simulator.market.instances import Instance, Phase
from provisioner.simulator.market.world import World
from provisioner.simulator.wire import BadJson, Reply, Request, text_reply

ANSWERS_KEPT, QUESTIONS_KEPT = 64, 256
"""How many past answers to one question are kept, and for how many questions, for listings that are stale."""

ROW_LISTS = ("instances", "offers", "pods", "gpus", "dataCenters")
"""Where the documented answers have their rows."""

LOST_AFTER_S = 600.0
"""How late an answer is that is delayed beyond every client's patience (the vastai client waits 120 s)."""


class App:
    """Answer requests for all front ends over one world."""

    def __init__(self, world: World, clock: SimClock, front_ends: Sequence[FrontEnd]) -> None:
        self.world = world
        self.clock = clock
        self.faults = Faults(world.draws.stream("faults"))
        self.journal = Journal()
        self.revoked: set[str] = set()
        self._front_ends = front_ends
        self._answers: dict[tuple[str, str, str, str, bytes], deque[tuple[float, Reply]]] = {}

    def catch_up(self) -> float:
        """Bring the world to the present, and return it."""
        now = self.clock.now()
        self.world.run_until(now)
        return self.world.now

    async def pump(self) -> None:
        """Let events happen at their time, though nobody asks: processes start, die and come back. Never returns."""
        while True:
            self.catch_up()
            due = self.world.agenda.next_at()
            await self.clock.doze_until(FOREVER_S if due is None else due)

    async def answer(self, request: Request) -> Reply:
        """Answer one request of any provider."""
        entry = self.journal.begin(request, self.catch_up())
        front = next((end for end in self._front_ends if request.path.startswith(tuple(end.prefixes))), None)
        reply = (
            text_reply(404, f"no provider has {request.path}")
            if front is None
            else await self._at(front, request, entry)
        )
        entry.status, entry.dropped, entry.ended_at = reply.status, reply.dropped, self.clock.now()
        self.clock.poke()  # what was planned by this call may be due before anything else
        return reply

    async def _at(self, front: FrontEnd, request: Request, entry: Entry) -> Reply:
        entry.provider = front.provider
        found = front.find(request)
        if isinstance(found, Reply):
            return found
        route, params = found
        try:
            target = front.target(request, route.endpoint, params)
        except BadJson as error:
            return front.refusal(
                request, Fault("", "bad_request", params={"detail": str(error)}), Target(front.provider, "")
            )
        entry.endpoint, entry.label, entry.key = target.endpoint, target.label, request.bearer()

        refused = await self._before(front, request, target, entry)
        caller = self._caller(request, target.endpoint)
        if refused is None and caller is None:
            refused = front.refusal(request, Fault("", "unauthorized"), target)
        if refused is not None or caller is None:
            return refused or text_reply(500, "unreachable")
        account, scope = caller
        call = Call(request, self.world, entry, params, target.endpoint, account, scope)
        if (limited := front.limited(call)) is not None:
            entry.limited = True
            return front.finish(call, limited)

        await self._call_takes(target, entry)
        self.catch_up()
        self._prepare(call, target)
        reply = front.finish(call, route.handler(call))
        return await self._after(call, target, reply)

    async def _before(self, front: FrontEnd, request: Request, target: Target, entry: Entry) -> Reply | None:
        now = self.catch_up()
        for fault in self.faults.strike(frozenset({"slow"}), target, now):
            entry.faults.append(fault.ident)
            await self.clock.sleep(float(fault.params.get("for_s", 10.0)))
            self.catch_up()
        for fault in self.faults.strike(kinds.REFUSALS, target, now):
            entry.faults.append(fault.ident)
            return _forced(fault) or front.refusal(request, fault, target)
        return None

    async def _call_takes(self, target: Target, entry: Entry) -> None:
        if target.endpoint == "create" and self.world.scenario.call_latency:
            latency = self.world.latencies.of(target.provider, "create_call")
            await self.clock.sleep(self.world.draws.stream(f"call/{entry.number}").latency(latency))

    def _prepare(self, call: Call, target: Target) -> None:
        """Let the faults strike that change what the call will find, or what becomes of its instance."""
        now = self.world.now
        call.faults = list(self.faults.strike(kinds.BEFORE - {"slow"} | kinds.DESTROYS, target, now))
        if target.endpoint == "create":
            fates = list(self.faults.strike(kinds.FATES, target, now))
            call.fate = {fault.kind: fault.params for fault in fates}
            call.entry.faults += [fault.ident for fault in fates]
        call.entry.faults += [fault.ident for fault in call.faults]

    def _caller(self, request: Request, endpoint: str) -> tuple[str, Instance | None] | None:
        """Return the account behind the request's key and the instance that the key is bound to, or None."""
        key = request.bearer()
        if key is None or key in self.revoked:
            return None
        for instance in self.world.instances.values():
            if instance.instance_key == key:
                alive = instance.phase is not Phase.GONE and endpoint in SELF_ENDPOINTS
                alive = alive and (instance.order.provider == "vast" or self.world.scenario.runpod_pod_key)
                return (instance.order.account, instance) if alive else None
        return key, None

    async def _after(self, call: Call, target: Target, reply: Reply) -> Reply:
        now = self.world.now
        past = self._past_answers(call)
        past.append((now, reply))
        for fault in self.faults.strike(kinds.AFTER, target, now):
            call.entry.faults.append(fault.ident)
            if fault.kind == "lost_answer":
                reply = await self._lose(fault, reply)
            elif fault.kind == "dribble":
                reply = replace(reply, dribble_s=float(fault.params.get("for_s", 10.0)))
            elif fault.kind == "stale":
                known_at = now - float(fault.params.get("by_s", 30.0))
                reply = next((old for at, old in reversed(past) if at <= known_at), past[0][1])
            else:
                reply = _with_rows_spoilt(reply, fault)
        return reply

    def _past_answers(self, call: Call) -> deque[tuple[float, Reply]]:
        """Return what this question was answered before, oldest first."""
        request = call.request
        question = (call.account, request.method, request.path, str(sorted(request.query.items())), request.body)
        if question not in self._answers and len(self._answers) >= QUESTIONS_KEPT:
            del self._answers[next(iter(self._answers))]
        return self._answers.setdefault(question, deque(maxlen=ANSWERS_KEPT))

    async def _lose(self, fault: Fault, reply: Reply) -> Reply:
        """Lose the answer to a call that has happened, in one of three ways (providers.md 7.3, 11)."""
        match fault.params.get("how", "drop"):
            case "drop":
                return replace(reply, dropped=True)
            case "delay":
                await self.clock.sleep(float(fault.params.get("for_s", LOST_AFTER_S)))
                return reply
            case _:
                return text_reply(
                    500, "<html><body><h1>500 Internal Server Error</h1></body></html>", media="text/html"
                )


def _forced(fault: Fault) -> Reply | None:
    """Return the answer of faults that are the same at every provider."""
    params = fault.params
    if fault.kind == "reset":
        return Reply(0, dropped=True)
    if fault.kind == "bad_body":
        return text_reply(int(params.get("status", 200)), '{"offers": [{"id": 1, ', media="application/json")
    if fault.kind == "reply":
        body = params.get("body", "")
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": str(params.get("type", "application/json")), **params.get("headers", {})}
        return Reply(int(params.get("status", 500)), text.encode(), headers)
    if fault.kind == "server_error" and params.get("html", True):
        status = int(params.get("status", 500))
        return text_reply(
            status, f"<html><head><title>{status}</title></head><body>nginx</body></html>", media="text/html"
        )
    return None


def _with_rows_spoilt(reply: Reply, fault: Fault) -> Reply:
    """Leave a row out, show one twice, or say null where an instance should be (providers.md 7.3, 12)."""
    document: Any = reply.document()
    name = next((name for name in ROW_LISTS if isinstance(document, dict) and name in document), None)
    if name is None:
        return reply
    rows = document[name]
    if fault.kind == "null_instance":
        document[name] = None
    elif isinstance(rows, list) and rows:
        at = int(fault.params.get("row", 0)) % len(rows)
        document[name] = rows[:at] + rows[at + 1 :] if fault.kind == "missing_row" else [*rows[: at + 1], *rows[at:]]
    return replace(reply, body=json.dumps(document).encode())
