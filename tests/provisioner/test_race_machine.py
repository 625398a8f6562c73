"""Does the race always end with one node, or none and nothing left to pay? From any order of events and crashes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from provisioner.core.ports import InstanceStatus
from provisioner.core.race.messages import Cancel, ClaimsAllowed, Listed, Rebid, Report
from provisioner.core.race.state import Outcome, RaceSettings
from tests.support.race_world import INCUMBENT, PROVIDERS, Box, RaceWorld

CREATES = [
    "created",
    "created",
    "left behind",
    "refused",
    "denied",
    "committed, unknown",
    "committed, silent",
    "committed twice, unknown",
    "lost, unknown",
]
LAG_S = st.sampled_from([0.0, 0.0, 3.0, 10.0])
"""At most the time after which a listing must show an instance (15 s by default)."""
RARELY = st.sampled_from([False] * 7 + [True])
OFTEN = st.booleans()
STARTS_MAX = 5


class RaceMachine(RuleBasedStateMachine):
    """Rules are what providers, nodes, the store, the user and a kill may do at any moment."""

    @initialize(keep_lost_s=st.sampled_from([0.0, 60.0]), budget_usd=st.sampled_from([0.3, 2.0, 50.0]))
    def begin(self, keep_lost_s: float, budget_usd: float) -> None:
        self.world = RaceWorld(
            RaceSettings(keep_lost_s=keep_lost_s, budget_usd=budget_usd, providers=frozenset(PROVIDERS))
        )
        self.late: list[Listed] = []
        self.world.do_all()
        self.world.offers([1.0, 1.1, 1.2, 0.9])
        self.world.do_all()

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @precondition(lambda self: self.world.commands)
    @rule(count=st.integers(1, 4))
    def commands_are_carried_out(self, count: int) -> None:
        for _ in range(min(count, len(self.world.commands))):
            self.world.do_one()

    @precondition(lambda self: self.world.commands)
    @rule()
    def all_commands_are_carried_out(self) -> None:
        self.world.do_all()

    @precondition(lambda self: self.world.searching)
    @rule(prices=st.lists(st.sampled_from([0.5, 1.0, 3.0, 12.0]), max_size=5), cached=st.booleans())
    def offers_come(self, prices: list[float], cached: bool) -> None:
        self.world.offers(prices, cached=cached)

    @precondition(lambda self: self.world.creates)
    @rule(data=st.data(), how=st.sampled_from(CREATES), lag_s=LAG_S)
    def a_create_ends(self, data: st.DataObject, how: str, lag_s: float) -> None:
        index = data.draw(st.integers(0, len(self.world.creates) - 1))
        self.world.end_create(index, how, lag_s)

    @precondition(lambda self: self.world.destroys)
    @rule(
        data=st.data(),
        how=st.sampled_from(["accepted", "accepted", "failed", "unanswered", "ignored"]),
        lingers_s=LAG_S,
    )
    def a_destroy_ends(self, data: st.DataObject, how: str, lingers_s: float) -> None:
        index = data.draw(st.integers(0, len(self.world.destroys) - 1))
        self.world.end_destroy(index, how, lingers_s)

    @rule(data=st.data(), provider=st.sampled_from(PROVIDERS), late=st.booleans(), omits=st.booleans())
    def a_listing_comes(self, data: st.DataObject, provider: str, late: bool, omits: bool) -> None:
        omit = data.draw(st.sampled_from(sorted(self.world.boxes))) if omits else None
        listing = self.world.listing(provider, omit)
        if late:
            self.late.append(listing)
        else:
            self.world.send(listing)

    @precondition(lambda self: self.late)
    @rule()
    def a_late_listing_comes(self) -> None:
        self.world.send(self.late.pop(0))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), report=st.sampled_from([*Report, Report.READY, Report.READY]))
    def a_node_speaks(self, data: st.DataObject, report: Report) -> None:
        self.world.says(data.draw(st.sampled_from(self.world.alive())), report)

    @precondition(lambda self: any(box.ident in self.world.permits for box in self.world.alive()))
    @rule(data=st.data())
    def a_node_claims(self, data: st.DataObject) -> None:
        boxes = [box for box in self.world.alive() if box.ident in self.world.permits]
        self.world.claims(data.draw(st.sampled_from(boxes)))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), status=st.sampled_from([InstanceStatus.STOPPED, InstanceStatus.FAILED]))
    def a_node_dies(self, data: st.DataObject, status: InstanceStatus) -> None:
        data.draw(st.sampled_from(self.world.alive())).status = status

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def a_node_vanishes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.alive())).ended_s = self.world.now_s

    @rule()
    def the_head_is_read(self) -> None:
        self.world.read_head()

    @rule()
    def claims_are_allowed(self) -> None:
        self.world.send(ClaimsAllowed())

    @precondition(lambda self: self.world.holder == INCUMBENT and self.world.boxes["i0"].alive)
    @rule(chance=RARELY)
    def the_incumbent_starts_again(self, chance: bool) -> None:
        if chance:
            self.world.writer_epoch += 1

    @rule(bid=st.sampled_from([0.5, 1.5]))
    def the_lost_node_is_for_sale(self, bid: float) -> None:
        self.world.send(Rebid(bid, bid))

    @precondition(lambda self: self.world.race.outcome is not Outcome.CANCELLED)
    @rule(chance=RARELY, everything=st.booleans())
    def it_is_cancelled(self, chance: bool, everything: bool) -> None:
        if chance:
            self.world.send(Cancel("changed its mind", everything=everything))

    @precondition(lambda self: self.world.starts < STARTS_MAX)
    @rule(chance=OFTEN)
    def the_controller_is_killed(self, chance: bool) -> None:
        if chance:
            self.world.start()

    @precondition(lambda self: self.candidates())
    @rule(data=st.data())
    def a_candidate_is_ready(self, data: st.DataObject) -> None:
        self.world.says(data.draw(st.sampled_from(self.candidates())), Report.READY)

    def candidates(self) -> list[Box]:
        return [box for box in self.world.alive() if box.ident != INCUMBENT]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for listing in self.late:
            world.send(listing)
        world.send(ClaimsAllowed())
        world.settle()
        world.check_end()
        if world.race.outcome is Outcome.RUNNING:
            raise AssertionError("the race neither has a winner nor says why not")
        assert world.race.why


TestRace = RaceMachine.TestCase
TestRace.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
