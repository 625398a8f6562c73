"""How an instance lives: it boots, runs, is outbid, comes back by itself, and ends.

State machines and their default durations: providers.md 7.2; what a preemption looks like: 1.7 (Vast: no notice, the
disk stays, it resumes by itself) and 2.4 (RunPod's historic spot: SIGTERM, five seconds, SIGKILL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from provisioner.simulator.draws import Draws
from provisioner.simulator.latencies import Latencies
from provisioner.simulator.market.agenda import Agenda
from provisioner.simulator.market.instances import ACTIVE, RESUMES_BY_ITSELF, Instance, Phase, Why
from provisioner.simulator.market.ledger import Ledger
from provisioner.simulator.market.nodes import Nodes
from provisioner.simulator.market.scenario import Scenario

Step = tuple[Phase, float]


class Journal(Protocol):
    """Where events of the world are noted."""

    def event(self, what: str, instance: Instance, **more: object) -> None:
        """Note that *what* happened to *instance* now."""


class Lives:
    """Move instances through their phases, keep their bills and their processes in step."""

    def __init__(
        self, agenda: Agenda, ledger: Ledger, latencies: Latencies, scenario: Scenario, draws: Draws, journal: Journal
    ) -> None:
        self._agenda = agenda
        self._ledger = ledger
        self._latencies = latencies
        self._scenario = scenario
        self._draws = draws
        self._journal = journal
        self.nodes: Nodes

    def boot(self, instance: Instance) -> None:
        """Begin at the beginning: provisioning, the image, and then running."""
        draws = self._draws.stream(f"boot/{instance.key}/{instance.boots}")
        instance.wanted_running, instance.why = True, Why.NOTHING
        self._enter(instance, Phase.PROVISIONING)
        self._plan(instance, self._steps(instance, draws))

    def resume(self, instance: Instance) -> None:
        """Bring a stopped container back on its own disk: the zombie's return (providers.md 1.7)."""
        instance.wanted_running, instance.why = True, Why.NOTHING
        if instance.boots == 0:
            self.boot(instance)
            return
        draws = self._draws.stream(f"resume/{instance.key}/{instance.boots}")
        self._enter(instance, Phase.LOADING)
        self._plan(instance, [(Phase.RUNNING, draws.latency(self._latencies.of("vast", "created_to_loading")))])

    def restart(self, instance: Instance) -> None:
        """Start the container anew, in place."""
        self.nodes.kill(instance)
        self.resume(instance)

    def stop(self, instance: Instance, why: Why) -> None:
        """Stop at once and say so at once: what a caller asked for."""
        self.nodes.kill(instance)
        instance.frozen = False
        instance.wanted_running, instance.why = why in RESUMES_BY_ITSELF, why
        self._enter(instance, Phase.STOPPED)

    def outbid(self, instance: Instance, *, freeze: bool) -> None:
        """Take the GPUs away without a notice; the API learns of it later."""
        if freeze and instance.phase is Phase.RUNNING:
            self.nodes.freeze(instance)
            instance.frozen = True
        else:
            self.nodes.kill(instance)
        draws = self._draws.stream(f"outbid/{instance.key}/{instance.life}")
        instance.why = Why.OUTBID
        instance.outbid_shows_exited = draws.chance(self._scenario.outbid_shows_exited)
        lag_s = draws.latency(self._latencies.of("vast", "state_visible_after_preemption"))
        self._enter(instance, Phase.STOPPED, shown_after_s=lag_s if self._scenario.lag else 0.0)
        self._journal.event("outbid", instance, lag_s=lag_s)

    def evict(self, instance: Instance) -> None:
        """Take a RunPod spot pod: SIGTERM now, SIGKILL after the notice (providers.md 2.4)."""
        instance.why = Why.OUTBID
        self.nodes.warn(instance)
        self._journal.event("eviction notice", instance)
        notice_s = self._latencies.of("runpod", "notice_spot").p50
        life = instance.life

        def end() -> None:
            if instance.life == life and instance.phase in ACTIVE:
                self.nodes.kill(instance)
                instance.wanted_running = False
                self._enter(instance, Phase.EXITED)

        self._agenda.after(notice_s, end)

    def exited(self, instance: Instance, code: int) -> None:
        """Take note that the container's program has ended by itself."""
        instance.why, instance.message = Why.DIED, f"exited with code {code}"
        self._enter(instance, Phase.EXITED)

    def lose(self, instance: Instance, phase: Phase) -> None:
        """Let the host fail: the processes are gone, and the API says *phase* (providers.md 1.4)."""
        self.nodes.kill(instance)
        instance.why = Why.DIED
        self._enter(instance, phase)

    def end(self, instance: Instance) -> None:
        """End the rental for good; only the bill stays."""
        self.nodes.kill(instance)
        self.nodes.wipe(instance)
        instance.wanted_running = False
        instance.ended_at = self._agenda.now
        self._enter(instance, Phase.GONE)
        self._ledger.close(instance.key, self._agenda.now)

    def bill(self, instance: Instance) -> None:
        """Charge what the present phase costs (providers.md 1.4 and 7.4)."""
        if instance.phase is Phase.GONE:
            return
        if instance.order.provider == "vast":
            # An exited container still holds its GPUs; an unreachable host is not paid for them.
            charged = instance.phase in {Phase.RUNNING, Phase.EXITED}
        else:
            charged = instance.phase in ACTIVE
        gpu = instance.gpu_rate() if charged else 0.0
        self._ledger.set_rates(instance.key, self._agenda.now, gpu=gpu, storage=instance.storage_rate())

    def _steps(self, instance: Instance, draws: Draws) -> list[Step]:
        machine, image = instance.machine, instance.order.image
        cached = image in machine.images or self._draws.stream(
            f"image/{machine.provider}/{machine.machine_id}/{image}"
        ).chance(self._scenario.image_cached)
        if instance.order.provider == "vast":
            boot = draws.latency(self._latencies.of("vast", "boot_image_cached" if cached else "boot_image_cold"))
            early = draws.latency(self._latencies.of("vast", "created_to_loading"))
            return [(Phase.CREATED, early * 0.4), (Phase.LOADING, early * 0.6), (Phase.RUNNING, boot)]
        name = "starting_image_cached" if cached else "starting_image_cold"
        starting = draws.latency(self._latencies.of("runpod", name))
        return [
            (Phase.LOADING, draws.latency(self._latencies.of("runpod", "provisioning"))),
            (Phase.RUNNING, starting),
        ]

    def _plan(self, instance: Instance, steps: Sequence[Step]) -> None:
        """Plan the first step; each step plans the next, unless this life has ended by then."""
        if not steps or instance.phase.value == instance.fate.get("stuck", {}).get("phase"):
            return
        (phase, after_s), life = steps[0], instance.life

        def step() -> None:
            if instance.life == life:
                self._advance(instance, phase)
            if instance.life == life:
                self._plan(instance, steps[1:])

        self._agenda.after(after_s, step)

    def _advance(self, instance: Instance, phase: Phase) -> None:
        if phase is Phase.RUNNING:
            self._run(instance)
            return
        instance.phase = instance.shown = phase
        self._journal.event(phase.value, instance)
        image = instance.order.image
        if phase is Phase.LOADING and "manifest_unknown" in instance.fate:
            instance.life += 1
            instance.message = f"Error response from daemon: manifest for {image} not found: manifest unknown"
            if instance.order.provider == "runpod":
                self.lose(instance, Phase.BROKEN)
        elif phase is Phase.LOADING and "oci_failure" in instance.fate:
            instance.life += 1
            instance.message = f"Error: OCI runtime create failed: {image}: nvidia-container-cli: requirement error"
            self.lose(instance, Phase.BROKEN)

    def _run(self, instance: Instance) -> None:
        instance.machine.images.add(instance.order.image)
        instance.started_at = self._agenda.now
        instance.message = f"success, running {instance.order.image}"
        instance.boots += 1
        frozen, instance.frozen = instance.frozen, False
        self._enter(instance, Phase.RUNNING)
        if frozen:
            self.nodes.thaw(instance)
        else:
            self.nodes.start(instance)
        if dies := instance.fate.get("dies"):
            life, phase = instance.life, Phase(dies.get("phase", Phase.EXITED))
            act = lambda: self.lose(instance, phase) if instance.life == life else None  # noqa: E731
            self._agenda.after(float(dies.get("after_s", 10.0)), act)

    def _enter(self, instance: Instance, phase: Phase, *, shown_after_s: float = 0.0) -> None:
        """Begin a new life in *phase*: what was planned for the old one no longer counts."""
        now = self._agenda.now
        instance.life += 1
        instance.phase, instance.changed_at = phase, now
        self._journal.event(phase.value, instance, why=instance.why.value)
        self.bill(instance)
        if shown_after_s <= 0:
            instance.shown = phase
            return
        life = instance.life

        def show() -> None:
            if instance.life == life:
                instance.shown = phase

        self._agenda.after(shown_after_s, show)
