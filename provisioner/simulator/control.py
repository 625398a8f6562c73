"""`/__sim/…`: how a test orders faults, moves time and asks the oracles, beside the providers' protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from provisioner.simulator import events, oracles
from provisioner.simulator.app import App
from provisioner.simulator.processes import ProcessNodes
from provisioner.simulator.wire import BadJson, Reply, Request, json_reply, text_reply

PREFIX = "/__sim/"


class Control:
    """The simulator's own endpoints."""

    def __init__(self, app: App, nodes: ProcessNodes | None) -> None:
        self._app = app
        self._nodes = nodes
        self._reads: dict[str, Callable[[Request], Any]] = {
            "state": lambda _: oracles.state(app),
            "alive": lambda request: oracles.alive(
                app, label=request.query.get("label"), provider=request.query.get("provider")
            ),
            "billed": lambda _: oracles.billed(app),
            "creates": lambda _: oracles.creates(app),
            "violations": lambda _: oracles.violations(app),
            "machines": lambda _: oracles.machines(app),
            "history": lambda _: app.world.history,
            "faults": lambda _: app.faults.report(),
            "clock": lambda _: {"now": app.world.now},
            "processes": lambda _: nodes.pids() if nodes else {},
            "journal": self._journal,
        }

    def answer(self, request: Request) -> Reply:
        """Answer one control request; mistakes in it are 400 with what was wrong."""
        self._app.catch_up()
        name, _, rest = request.path.removeprefix(PREFIX).rstrip("/").partition("/")
        try:
            match request.method, name:
                case "GET", "logs":
                    return text_reply(200, self._nodes.log(rest) if self._nodes else "")
                case "GET", _ if name in self._reads:
                    return json_reply(200, self._reads[name](request))
                case "DELETE", "faults":
                    return json_reply(200, {"removed": self._app.faults.remove(rest or None)})
                case "POST", _:
                    return json_reply(200, self._act(name, request.json()))
                case _:
                    return json_reply(404, {"error": f"{request.method} {request.path} is not known"})
        except (BadJson, ValueError, KeyError, TypeError) as error:
            return json_reply(400, {"error": f"{type(error).__name__}: {error}"})

    def _act(self, name: str, body: dict[str, Any]) -> Any:
        match name:
            case "faults":
                return self.order(body)
            case "clock":
                self._app.clock.advance(float(body["advance_s"]))
                return {"now": self._app.catch_up()}
            case "leaks":
                return [entry.report() for entry in self._app.journal.holding(list(body["needles"]))]
            case "traffic":
                return self._traffic(body)
            case _:
                raise ValueError(f"POST {PREFIX}{name} is not known")

    def order(self, body: dict[str, Any]) -> dict[str, Any]:
        """Set one fault, from its JSON form, and return it with its id."""
        fault = self._app.faults.add(body, self._app.world.now)
        events.plan(self._app, fault)
        self._app.catch_up()
        return fault.report()

    def _traffic(self, body: dict[str, Any]) -> dict[str, Any]:
        """Charge an instance for bytes at its host's rates (providers.md 1.2)."""
        instance = self._app.world.instances[body["instance"]]
        machine = instance.machine
        dollars = float(body.get("up_gb", 0)) * machine.up_cost + float(body.get("down_gb", 0)) * machine.down_cost
        self._app.world.ledger.add_traffic(instance.key, dollars)
        return {"charged": dollars}

    def _journal(self, request: Request) -> list[dict[str, Any]]:
        wanted = request.query
        return [
            entry.report()
            for entry in self._app.journal
            if entry.number > int(wanted.get("after", 0))
            and ("endpoint" not in wanted or entry.endpoint == wanted["endpoint"])
            and ("provider" not in wanted or entry.provider == wanted["provider"])
        ]
