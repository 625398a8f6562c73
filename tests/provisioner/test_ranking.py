"""Does the order depend on the offers alone, and does being better never rank an offer lower?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core import blocklist
from provisioner.core.blocklist import Blocklist, broken, taken
from provisioner.core.errors import LedgerCorrupt
from provisioner.core.offers import Market, Offer, Price, Traffic
from provisioner.core.ranking import RankSettings, disk_needed_gb, launch_order, phases_of, race_order, rank
from provisioner.core.timing import BOOT_RUNPOD, BOOT_VAST, Comeback
from tests.provisioner.test_offers import NOW_S, OFFERS, offer

SETTINGS = RankSettings(
    comeback=Comeback(critical_gb=94, eager_gb=1),
    traffic=Traffic(50, 10),
    boots={"vast": BOOT_VAST, "runpod": BOOT_RUNPOD},
)


@given(st.lists(OFFERS, max_size=10, unique_by=lambda one: one.key), st.randoms())
def test_the_order_of_arrival_changes_nothing(offers: list[Offer], random: object) -> None:
    shuffled = list(offers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rank(offers, SETTINGS) == rank(shuffled, SETTINGS)
    assert race_order(rank(offers, SETTINGS)) == race_order(rank(shuffled, SETTINGS))


@given(st.lists(OFFERS, min_size=1, max_size=10, unique_by=lambda one: one.key))
def test_the_race_order_loses_nothing_and_begins_with_the_best(offers: list[Offer]) -> None:
    ranked = rank(offers, SETTINGS)
    ordered = race_order(ranked)
    assert sorted(r.offer.key for r in ordered) == sorted(r.offer.key for r in ranked)
    assert ordered[0] == ranked[0]


@given(OFFERS)
def test_a_better_offer_never_ranks_lower(one: Offer) -> None:
    better = [
        replace(one, price=replace(one.price, compute_usd_h=one.price.compute_usd_h / 2)),
        replace(one, image_cached=True),
        replace(one, reliability=1.0),
        replace(one, down_mbps=100_000.0),
    ]
    for other in better:
        figures = [rank([each], SETTINGS)[0] for each in (one, other)]
        assert figures[1].useful_usd_h <= figures[0].useful_usd_h + 1e-9
        assert figures[1].phases.step_s <= figures[0].phases.step_s + 1e-9


def test_a_cached_image_beats_a_slightly_cheaper_cold_one() -> None:
    cold, warm = offer(offer_id="1", price=Price(1.0)), offer(offer_id="2", price=Price(1.02), image_cached=True)
    assert [r.offer.offer_id for r in rank([cold, warm], SETTINGS)] == ["2", "1"]


def test_upload_is_part_of_the_price() -> None:
    dear, cheap = (
        offer(offer_id="1", price=Price(1.0, up_usd_gb=0.02)),
        offer(offer_id="2", price=Price(1.3)),
    )
    assert [r.offer.offer_id for r in rank([dear, cheap], SETTINGS)] == ["2", "1"]
    assert rank([dear], SETTINGS)[0].usd_h == pytest.approx(2.0)


def test_phases_add_up() -> None:
    phases = phases_of(offer(image_cached=True, down_mbps=10_000.0), SETTINGS)
    assert phases.ready_s == pytest.approx(15 + 2 + 23 + 12 + 1 + 0.8)
    assert phases.step_s == pytest.approx(phases.ready_s + 75.2 + 10)
    assert sum(seconds for _, seconds in phases.items()) == pytest.approx(phases.step_s)


def test_a_known_image_pulls_at_the_machines_link() -> None:
    small = RankSettings(comeback=Comeback(image_gb=1.0))
    fast, slow = offer(down_mbps=10_000.0), offer(down_mbps=100.0)
    assert phases_of(fast, small).boot_s < phases_of(slow, small).boot_s - 70
    assert phases_of(fast, small).boot_s < phases_of(fast, RankSettings()).boot_s


def test_the_first_candidates_spread_over_providers_and_machines() -> None:
    offers = [
        offer(offer_id="1", machine_id="m1", price=Price(1.0)),
        offer(offer_id="2", machine_id="m1", price=Price(1.1)),
        offer(offer_id="3", machine_id="m3", price=Price(1.2)),
        offer(provider="runpod", offer_id="4", machine_id=None, price=Price(5.0)),
    ]
    assert [r.offer.offer_id for r in race_order(rank(offers, RankSettings()))] == ["1", "4", "3", "2"]


def test_what_has_run_the_image_is_launched_first_among_those_that_race_and_nobody_else_is() -> None:
    prices = [offer(offer_id=str(number), machine_id=f"m{number}", price=Price(1 + number)) for number in range(5)]
    seen = [replace(one, image_seen=one.offer_id in ("2", "4")) for one in prices]
    ordered = launch_order(rank(seen, RankSettings(waiting_usd_h=0.0)), 3)
    assert [entry.offer.offer_id for entry in ordered] == ["2", "0", "1", "3", "4"]


def test_our_history_of_an_image_shortens_what_is_expected_and_no_deadline() -> None:
    seen, cold = (rank([offer(image_seen=known)], SETTINGS)[0] for known in (True, False))
    cached = rank([offer(image_cached=True)], SETTINGS)[0]
    assert seen.phases == cached.phases
    assert seen.ready_by_s == cold.ready_by_s > cached.ready_by_s
    gone = rank([offer(image_seen=True, image_cached=False)], SETTINGS)[0]
    assert gone.phases == cold.phases, "the provider's own word counts first"


@given(st.integers(0, 10**13), st.booleans(), st.floats(0, 1000))
def test_the_directory_form_has_room_for_everything(logical: int, directory: bool, asked: float) -> None:
    disk = disk_needed_gb(logical, directory_form=directory, asked_gb=asked)
    assert disk >= asked
    assert not directory or disk >= 1.1 * logical / 1e9 - 1e-3


def test_a_broken_machine_is_left_alone_for_a_day() -> None:
    bad = offer(offer_id="1", machine_id="m1")
    listed = Blocklist().with_entry(broken(bad, "CUDA does not work", NOW_S), NOW_S)
    assert listed.blocks(replace(bad, offer_id="other"), NOW_S + 3600)
    assert not listed.blocks(replace(bad, machine_id="m2"), NOW_S)
    assert not listed.blocks(replace(bad, provider="runpod"), NOW_S)
    assert not listed.blocks(bad, NOW_S + 86_400)


def test_without_a_machine_id_region_and_gpu_are_blocked_for_an_hour() -> None:
    bad = offer(provider="runpod", machine_id=None, location="EU-SE-1")
    listed = Blocklist().with_entry(broken(bad, "never booted", NOW_S), NOW_S)
    assert listed.blocks(replace(bad, market=Market.ON_DEMAND, offer_id="9"), NOW_S + 3599)
    assert not listed.blocks(replace(bad, location="EU-RO-1"), NOW_S)
    assert not listed.blocks(bad, NOW_S + 3600)


def test_a_taken_offer_comes_back_soon() -> None:
    listed = Blocklist().with_entry(taken(offer(), "no capacity", NOW_S), NOW_S)
    assert listed.allowed([offer(), offer(offer_id="2")], NOW_S + 60) == (offer(offer_id="2"),)
    assert listed.allowed([offer()], NOW_S + 120) == (offer(),)


@given(st.lists(st.tuples(OFFERS, st.booleans(), st.floats(0, 1e5)), max_size=10))
def test_the_blocklist_survives_its_encoding_and_never_shortens(entries: list[tuple[Offer, bool, float]]) -> None:
    listed = Blocklist()
    for one, is_broken, after_s in sorted(entries, key=lambda entry: entry[2]):
        now_s = NOW_S + after_s
        before = {(e.provider, e.scope, e.subject): e.until_s for e in listed.entries}
        listed = listed.with_entry((broken if is_broken else taken)(one, "why", now_s), now_s)
        after = {(e.provider, e.scope, e.subject): e.until_s for e in listed.entries}
        assert all(after[key] >= until_s for key, until_s in before.items() if until_s > now_s)
        assert listed.blocks(one, now_s)
    assert blocklist.decode(blocklist.encode(listed)) == listed


@pytest.mark.parametrize("body", [b"", b"[]", b'{"version":2,"blocked":[]}', b'{"version":1,"blocked":[{"x":1}]}'])
def test_a_blocklist_that_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(LedgerCorrupt, match="blocklist"):
        blocklist.decode(body)
