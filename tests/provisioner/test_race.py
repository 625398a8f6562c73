"""The race's rules, one history at a time: what is launched when, who wins, what is reaped, what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.core.blocklist import OFFER_BLOCKED_S
from provisioner.core.intents import IntentState
from provisioner.core.ports import Created, CreateRefused, InstanceStatus, RefusedWhy
from provisioner.core.race.messages import (
    Announce,
    Block,
    Cancel,
    ClaimsAllowed,
    Create,
    CreateEnded,
    Destroy,
    OffersFound,
    Permit,
    RaiseBid,
    Rebid,
    Record,
    Report,
    Search,
)
from provisioner.core.race.state import Deadlines, Outcome, Phase, RaceSettings
from provisioner.core.ranking import RankSettings, race_order, rank
from tests.support.race_world import INCUMBENT, PROVIDERS, RaceWorld, offer_of


def begun(prices: list[float], *, cached: bool = True, **changes: object) -> RaceWorld:
    """A race that has searched and found offers at these prices, with the first creates on the way."""
    world = RaceWorld(RaceSettings(**changes))  # type: ignore[arg-type]
    world.do_all()
    assert world.searching
    world.offers(prices, cached=cached)
    return world


def booted(world: RaceWorld, count: int) -> None:
    world.do_all()
    for _ in range(count):
        world.end_create(0, "created")
        world.do_all()


def phases(world: RaceWorld) -> dict[str, Phase]:
    return {c.ident: c.phase for c in world.race.candidates.values() if c.ident != INCUMBENT}


def test_the_intent_is_recorded_before_the_create() -> None:
    world = begun([1.0, 1.0])
    kinds = [type(command) for command in world.commands]
    assert kinds == [Record, Create, Record, Create]
    first = world.commands[0]
    assert isinstance(first, Record)
    assert first.record.state is IntentState.WRITTEN


def test_two_at_once_then_one_every_five_seconds_up_to_three() -> None:
    world = begun([1.0] * 6)
    assert len(phases(world)) == 2
    assert {c.provider for c in world.race.live()} == set(PROVIDERS)
    world.wait(4.0)
    assert len(phases(world)) == 2
    world.wait(1.5)
    assert len(phases(world)) == 3
    world.wait(30.0)
    assert len(phases(world)) == 3


def test_nothing_is_launched_while_one_is_ready() -> None:
    world = begun([1.0] * 6)
    booted(world, 2)
    world.says(world.alive()[1], Report.READY)
    world.wait(30.0)
    assert len(phases(world)) == 2


def test_a_refused_create_is_replaced_at_once_and_its_offer_blocked() -> None:
    world = begun([1.0] * 6)
    world.do_all()
    world.end_create(0, "refused")
    assert len(world.race.live()) == 2
    assert any(isinstance(command, Block) for command in world.commands)
    assert phases(world)["00000001-1"] is Phase.GONE


@pytest.mark.parametrize(("price", "cached", "most"), [(9.0, False, 3), (11.0, False, 2), (11.0, True, 3)])
def test_dear_cold_machines_race_in_pairs(price: float, cached: bool, most: int) -> None:
    world = begun([price] * 6, cached=cached, race_budget_usd=1000.0)
    world.wait(30.0)
    world.wait(10.0)
    assert len(phases(world)) == most


def test_the_race_budget_lets_one_run_and_forbids_the_second() -> None:
    world = begun([11.0] * 6, cached=False, race_budget_usd=1.0)
    assert len(phases(world)) == 1
    assert "race budget" in world.race.notes[-1]


def test_no_money_at_all_ends_the_race_and_says_so() -> None:
    world = begun([11.0] * 3, budget_usd=0.5)
    assert world.race.outcome is Outcome.FAILED
    assert "$0.50 are left" in world.race.why


def test_claims_wait_for_the_word_and_the_head_names_the_winner() -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    first, second = world.alive()[1:]
    world.says(first, Report.READY)
    world.says(second, Report.READY)
    assert not any(isinstance(command, Permit) for command in world.commands)
    world.send(ClaimsAllowed())
    assert [c.writer_epoch for c in world.commands if isinstance(c, Permit)] == [8, 8]
    world.do_all()
    world.claims(second)
    world.claims(first)
    world.read_head()
    assert world.race.winner is not None
    assert world.race.winner.ident == second.ident
    destroyed = {c.instance_id for c in world.commands if isinstance(c, Destroy)}
    assert destroyed == {first.instance_id, "i0"}
    world.settle()
    world.check_end()


def test_a_node_that_won_while_it_was_being_destroyed_is_no_winner() -> None:
    world = begun([1.0] * 4)
    booted(world, 2)
    slow = world.alive()[1]
    world.says(slow, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.wait(61.0)
    world.read_head()
    assert phases(world)[slow.ident] is Phase.REAPING
    world.claims(slow)
    world.read_head()
    assert world.race.outcome is Outcome.RUNNING
    world.settle()
    world.check_end()
    assert world.race.winner is not None
    assert world.race.winner.ident != slow.ident
    assert world.writer_epoch == 9


def test_a_claim_whose_time_is_over_is_judged_by_the_head_alone() -> None:
    world = begun([1.0])
    booted(world, 1)
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(node)
    world.wait(300.0)
    assert phases(world)[node.ident] is Phase.CLAIMING
    world.read_head()
    assert phases(world)[node.ident] is Phase.WINNER


def test_a_stranger_who_takes_over_ends_the_race() -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    world.writer_epoch, world.holder = 8, None
    world.read_head()
    assert world.race.outcome is Outcome.FAILED
    assert "belongs to somebody else" in world.race.why
    world.settle()
    assert [box.ident for box in world.alive()] == [INCUMBENT]


def test_an_incumbent_that_starts_again_cancels_the_race() -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    world.writer_epoch = 8
    world.read_head()
    assert world.race.outcome is Outcome.CANCELLED
    world.settle()
    world.check_end()
    assert [box.ident for box in world.alive()] == [INCUMBENT]


def test_a_false_alarm_reaps_the_candidates_and_leaves_the_node() -> None:
    world = begun([1.0, 1.0])
    world.do_all()
    world.end_create(0, "created")
    world.send(Cancel("its heartbeat moves again"))
    world.settle()
    world.check_end()
    assert [box.ident for box in world.alive()] == [INCUMBENT]


def test_a_false_alarm_after_a_permit_does_not_stop_the_race() -> None:
    world = begun([1.0])
    booted(world, 1)
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.send(Cancel("its heartbeat moves again"))
    assert world.race.outcome is Outcome.RUNNING
    world.wait(61.0)
    world.read_head()
    assert phases(world)[node.ident] is Phase.REAPING
    world.send(Cancel("its heartbeat moves again"))
    assert "may have taken" in world.race.notes[-1], "it may claim until it is gone"
    for _ in range(3):
        world.do_all()
        while world.destroys:
            world.end_destroy(0, "accepted")
        world.wait(2.0)
        world.send(world.listing("vast"))
    world.read_head()
    world.send(Cancel("its heartbeat moves again"))
    assert world.race.outcome is Outcome.CANCELLED


def test_a_fenced_incumbent_cannot_call_the_race_off() -> None:
    world = begun([1.0] * 4)
    booted(world, 2)
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.wait(61.0)
    world.read_head()
    world.claims(node)
    world.read_head()
    world.send(Cancel("its heartbeat moves again"))
    assert "belongs to" in world.race.notes[-1] or "may have taken" in world.race.notes[-1]
    world.settle()
    world.check_end()
    assert world.race.outcome is Outcome.WON


@pytest.mark.parametrize("how", ["committed, unknown", "committed, silent", "lost, unknown"])
def test_an_unknown_create_is_settled_by_its_label(how: str) -> None:
    world = begun([1.0])
    world.do_all()
    world.end_create(0, how, lag_s=10.0)
    world.wait(61.0)
    assert phases(world)["00000001-1"] is Phase.SETTLING
    for _ in range(4):
        world.send(world.listing("vast"))
        world.wait(8.0)
    expected = Phase.GONE if how.startswith("lost") else Phase.BOOTING
    assert phases(world)["00000001-1"] is expected


def test_a_second_instance_of_the_winner_is_reaped_and_the_node_is_not() -> None:
    world = begun([1.0])
    world.do_all()
    world.end_create(0, "committed twice, unknown")
    double, node = world.alive()[1:]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(node)
    world.read_head()
    world.settle()
    world.check_end()
    assert world.alive() == [node]
    assert not double.alive


def test_two_instances_under_one_label_before_a_claim_are_both_reaped() -> None:
    world = begun([1.0])
    world.do_all()
    world.end_create(0, "committed twice, unknown")
    world.send(world.listing("vast"))
    assert phases(world)["00000001-1"] is Phase.REAPING
    assert len([c for c in world.commands if isinstance(c, Destroy)]) == 2


def test_a_low_bid_that_leaves_a_stopped_instance_is_reaped() -> None:
    world = begun([1.0])
    world.do_all()
    world.end_create(0, "left behind")
    left = world.alive()[1]
    assert [c.instance_id for c in world.commands if isinstance(c, Destroy)] == [left.instance_id]


def test_one_missing_row_proves_nothing_and_a_destroy_that_failed_is_sent_again() -> None:
    world = begun([1.0])
    booted(world, 1)
    box = world.alive()[1]
    world.says(box, Report.UNFIT)
    world.do_all()
    world.end_destroy(0, "failed")
    world.wait(20.0)
    world.do_all()
    assert len(world.destroys) == 1
    world.end_destroy(0, "accepted", lingers_s=30.0)
    world.wait(5.0)
    world.send(world.listing("vast", omit=box.instance_id))
    assert phases(world)[box.ident] is Phase.REAPING
    world.wait(20.0)
    world.send(world.listing("vast"))
    world.wait(20.0)
    assert phases(world)[box.ident] is Phase.REAPING
    world.do_all()
    assert world.destroys, "still shown long after its end was accepted: destroyed again"
    while world.destroys:
        world.end_destroy(0, "accepted")
    for _ in range(2):
        world.wait(5.0)
        world.send(world.listing("vast"))
    assert phases(world)[box.ident] is Phase.GONE


def test_somebody_elses_instances_are_never_touched() -> None:
    world = begun([1.0])
    listing = world.listing("vast")
    alien = replace(listing.instances[0], instance_id="x", label="production-db")
    other_job = replace(listing.instances[0], instance_id="y", label="sw-other-0badcafe-7")
    world.send(replace(listing, instances=(*listing.instances, alien, other_job)))
    assert not any(isinstance(command, Destroy) for command in world.commands)


def test_from_an_empty_ledger_the_holder_is_kept_and_strays_are_reaped() -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    world.ledger.clear()
    world.start()
    for provider in PROVIDERS:
        world.send(world.listing(provider))
    destroyed = {c.ident for c in world.commands if isinstance(c, Destroy)}
    assert destroyed == {"00000001-1", "00000001-2"}
    assert world.race.candidates[INCUMBENT].phase is Phase.INCUMBENT


def test_a_bid_that_became_on_demand_or_dearer_is_reaped() -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    listing = world.listing("runpod")
    dearer = replace(listing.instances[0], usd_h=2.0)
    world.send(replace(listing, instances=(dearer,)))
    [box] = [box for box in world.alive() if box.provider == "runpod"]
    assert phases(world)[box.ident] is Phase.REAPING
    assert "costs $2.000/h" in world.race.notes[-1]


def test_the_lost_node_races_too_and_is_kept_for_salvage_when_it_loses() -> None:
    world = begun([1.0], keep_lost_s=1800.0)
    booted(world, 1)
    world.boxes["i0"].status = InstanceStatus.STOPPED
    world.send(Rebid(1.5, 1.6))
    assert RaiseBid("vast", "i0", 1.5) in world.commands
    world.send(world.listing("vast"))
    assert world.race.candidates[INCUMBENT].phase is Phase.BOOTING
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(node)
    world.read_head()
    assert world.race.candidates[INCUMBENT].phase is Phase.KEPT
    assert not world.race.done
    world.wait(1801.0)
    assert world.race.candidates[INCUMBENT].phase is Phase.REAPING
    world.settle()
    world.check_end()


def test_the_lost_node_wins_with_a_higher_bid() -> None:
    world = begun([1.0])
    booted(world, 1)
    world.send(Rebid(1.5, 1.6))
    world.says(world.boxes["i0"], Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(world.boxes["i0"])
    world.read_head()
    world.settle()
    world.check_end()
    assert world.race.winner is not None
    assert world.race.winner.ident == INCUMBENT


def test_no_offers_backs_off_and_then_asks_for_on_demand_too() -> None:
    world = RaceWorld(RaceSettings(on_demand=True))
    assert list(world.commands)[-1] == Search(spot=True, on_demand=False)
    world.offers([])
    world.commands.clear()
    world.wait(14.0)
    assert not world.commands
    world.wait(1.5)
    assert list(world.commands) == [Search(spot=True, on_demand=True)]
    assert world.race.notes[-1] == "nothing on the market"


def vanished(world: RaceWorld, ident: str) -> list[Block]:
    """Let the instance of a booting candidate be taken away, and return what is blocked for it."""
    world.commands.clear()
    (box,) = [box for box in world.alive() if box.ident == ident]
    box.ended_s = world.now_s
    # Two listings, after the time within which a new instance may be missing.
    for _ in range(2):
        world.wait(16.0)
        world.send(world.listing(box.provider))
    assert phases(world)[ident] is Phase.REAPING
    return [command for command in world.commands if isinstance(command, Block)]


def test_a_candidate_that_is_taken_in_its_boot_is_asked_for_again_and_its_machine_is_not_blamed() -> None:
    # Where machines have no names, the blame would bar the whole region and GPU for an hour (case F01).
    same = replace(offer_of("vast", 1), machine_id=None)
    world = RaceWorld()
    world.do_all()
    ranked = rank([same], RankSettings())
    world.send(OffersFound(ranked))
    booted(world, 1)
    assert vanished(world, "00000001-1") == []
    world.do_all()
    assert world.searching, "there is nothing left to launch: offers are asked for at once"
    world.send(OffersFound(ranked))
    booted(world, 1)
    (again,) = vanished(world, "00000001-2")
    assert (again.entry.scope, again.entry.until_s - world.now_s) == ("offer", OFFER_BLOCKED_S)


def test_after_a_failure_the_first_search_comes_at_once_and_later_ones_keep_their_pauses() -> None:
    world = begun([1.0])
    booted(world, 1)
    world.commands.clear()
    world.says(world.alive()[1], Report.UNFIT)
    assert any(isinstance(command, Search) for command in world.commands)
    world.do_all()
    world.offers([1.0])
    booted(world, 1)
    world.says(world.alive()[-1], Report.UNFIT)
    assert not any(isinstance(command, Search) for command in world.commands)


def test_a_search_without_an_answer_is_sent_again() -> None:
    world = RaceWorld()
    world.commands.clear()
    world.wait(61.0)
    assert any(isinstance(command, Search) for command in world.commands)


def test_old_offers_are_not_launched() -> None:
    world = begun([1.0] * 6)
    booted(world, 2)
    for box in world.alive()[1:]:
        box.ended_s = world.now_s
    world.wait(61.0)
    for _ in range(2):
        for provider in PROVIDERS:
            world.send(world.listing(provider))
        world.wait(1.0)
    assert not world.race.live() or all(c.record.intent.written_at_s < 1060 for c in world.race.live())
    assert any(isinstance(command, Search) for command in world.commands)


def test_a_revoked_key_bars_the_provider_and_no_provider_ends_the_race() -> None:
    world = begun([1.0] * 4, providers=frozenset(PROVIDERS))
    world.do_all()
    barred = world.creates[0][0].intent.provider
    world.end_create(0, "denied")
    assert world.race.barred.keys() == {barred}
    assert {c.provider for c in world.race.live()} == set(PROVIDERS) - {barred}
    world.do_all()
    while world.creates:
        world.end_create(0, "denied")
        world.do_all()
    assert world.race.outcome is Outcome.FAILED
    assert "key revoked" in world.race.why


def test_giving_up_says_why() -> None:
    world = RaceWorld(RaceSettings(give_up_after_s=600.0))
    world.offers([])
    world.wait(601.0)
    assert world.race.outcome is Outcome.FAILED
    assert world.race.why == "no winner after 601 s: nothing on the market"


@pytest.mark.parametrize("lost", ["create", "answer"])
def test_a_controller_killed_at_the_create_never_sends_it_again(lost: str) -> None:
    world = begun([1.0])
    world.do_one()
    if lost == "answer":
        world.do_one()
    world.start()
    world.do_all()
    assert phases(world)["00000001-1"] is Phase.SETTLING
    if lost == "answer":
        world.end_create(0, "created")
    world.send(ClaimsAllowed())
    world.settle()
    world.check_end()


def test_a_claim_that_nobody_saw_is_found_after_a_restart() -> None:
    world = begun([1.0])
    booted(world, 1)
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(node)
    world.start()
    assert world.race.winner is not None
    assert world.race.winner.ident == node.ident


@pytest.mark.parametrize("records", [1, 2])
def test_a_controller_killed_at_the_victory_leaves_one_node(records: int) -> None:
    world = begun([1.0, 1.0])
    booted(world, 2)
    first, second = world.alive()[1:]
    for node in (first, second):
        world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_all()
    world.claims(first)
    world.read_head()
    while records:
        records -= isinstance(world.commands[0], Record)
        world.do_one()
    world.start()
    world.send(Cancel("the winner lives"))
    world.settle()
    world.check_end()
    assert [box.ident for box in world.alive()] == [first.ident]


def test_a_permit_that_may_not_have_arrived_is_given_again() -> None:
    world = begun([1.0])
    booted(world, 1)
    node = world.alive()[1]
    world.says(node, Report.READY)
    world.send(ClaimsAllowed())
    world.do_one()
    assert not world.permits
    world.start()
    world.do_all()
    assert not world.permits, "detection has not spoken yet"
    world.send(ClaimsAllowed())
    world.do_all()
    assert world.permits == {node.ident: 8}


@given(
    st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6),
    st.floats(0.05, 3.0),
    st.lists(st.sampled_from(["created", "refused", "unfit", "never ready"]), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_what_is_billed_stays_within_the_budget(prices: list[float], budget_usd: float, fates: list[str]) -> None:
    world = RaceWorld(RaceSettings(budget_usd=budget_usd, deadlines=Deadlines(boot_min_s=60.0)))
    for turn in range(60):
        world.do_all()
        if world.searching:
            world.offers(prices)
        while world.creates:
            world.end_create(0, "refused" if fates[turn % len(fates)] == "refused" else "created")
        while world.destroys:
            world.end_destroy(0, "accepted")
        for number, box in enumerate(world.alive()):
            if fates[(turn + number) % len(fates)] == "unfit" and box.ident != INCUMBENT:
                world.says(box, Report.UNFIT)
        for provider in PROVIDERS:
            world.send(world.listing(provider))
        world.wait(20.0)
    billed_usd = sum(
        box.usd_h * ((world.now_s if box.ended_s is None else box.ended_s) - box.since_s) / 3600
        for box in world.boxes.values()
        if box.ident != INCUMBENT
    )
    assert billed_usd <= budget_usd
    assert billed_usd <= world.race.spent_usd(world.now_s) + 1e-9


def test_one_machine_is_not_raced_twice() -> None:
    world = RaceWorld()
    same = [replace(offer_of("vast", number), machine_id="m7") for number in (1, 2, 3)]
    world.send(OffersFound(race_order(rank(same, RankSettings()))))
    world.wait(20.0)
    assert len(phases(world)) == 1


def test_a_late_answer_to_a_candidate_that_was_given_up_is_reaped() -> None:
    world = begun([1.0])
    world.do_all()
    create, _ = world.creates.pop(0)
    world.send(CreateEnded(create.intent.ident, CreateRefused(RefusedWhy.NO_CAPACITY, "taken")))
    assert phases(world)[create.intent.ident] is Phase.GONE
    box = world.rent(create)
    world.send(CreateEnded(create.intent.ident, Created(box.instance_id)))
    assert any(isinstance(c, Destroy) and c.instance_id == box.instance_id for c in world.commands)
    assert any(isinstance(c, Announce) for c in world.commands)


def test_listings_inside_the_lag_prove_nothing_about_an_unknown_create() -> None:
    world = begun([1.0])
    world.do_all()
    world.end_create(0, "committed, unknown", lag_s=10.0)
    for _ in range(4):
        world.wait(2.0)
        world.send(world.listing("vast"))
    assert phases(world)["00000001-1"] is Phase.SETTLING
    world.wait(8.0)
    world.send(world.listing("vast"))
    assert phases(world)["00000001-1"] is Phase.BOOTING


def test_a_loser_is_not_verified_gone_before_its_destroy_is_accepted() -> None:
    world = begun([1.0])
    booted(world, 1)
    box = world.alive()[1]
    world.wait(20.0)
    world.says(box, Report.UNFIT)
    world.do_all()
    world.end_destroy(0, "failed")
    box.ended_s = world.now_s
    for _ in range(3):
        world.wait(2.0)
        world.send(world.listing("vast"))
    assert phases(world)[box.ident] is Phase.REAPING
    world.wait(10.0)
    world.do_all()
    world.end_destroy(0, "accepted")
    for _ in range(2):
        world.wait(2.0)
        world.send(world.listing("vast"))
    assert phases(world)[box.ident] is Phase.GONE


def test_a_create_on_the_way_is_settled_before_it_counts_as_gone() -> None:
    world = begun([1.0])
    world.do_all()
    world.send(Cancel("its heartbeat moves again"))
    assert phases(world)["00000001-1"] is Phase.REQUESTED
    assert not world.race.done
    world.end_create(0, "created")
    assert phases(world)["00000001-1"] is Phase.REAPING


def test_who_was_beaten_by_a_node_that_is_gone_is_replaced_at_once() -> None:
    world = begun([1.0] * 4)
    booted(world, 2)
    slow, other = world.alive()[1:]
    world.says(slow, Report.READY)
    world.send(ClaimsAllowed())
    world.wait(50.0)
    world.says(other, Report.READY)
    world.do_all()
    world.wait(12.0)
    world.read_head()
    assert phases(world) == {slow.ident: Phase.REAPING, other.ident: Phase.CLAIMING}
    world.claims(slow)
    world.read_head()
    assert phases(world)[other.ident] is Phase.REAPING


def test_a_false_alarm_spares_the_node_that_was_bid_for() -> None:
    world = begun([1.0])
    world.send(Rebid(1.5, 1.6))
    world.send(Cancel("it is back by itself"))
    assert world.race.candidates[INCUMBENT].phase is Phase.INCUMBENT
    world.settle()
    world.check_end()
    assert [box.ident for box in world.alive()] == [INCUMBENT]
