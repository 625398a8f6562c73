"""Do the plan's and the report's figures say what the numbers say?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core.cost import (
    AWS_S3,
    OWN,
    Loss,
    Stay,
    hourly,
    race_budget_usd,
    recomputation_avoided_h,
    saved_percent,
    spend,
    stay_of,
)
from provisioner.core.intents import IntentRecord, IntentState, advanced
from provisioner.core.offers import Price, Traffic
from provisioner.core.plan import Forecast, Workload, forecast, least_every_s, least_up_mbps, overall, verdict
from provisioner.core.ranking import Ranked, RankSettings, rank
from provisioner.core.timing import Comeback
from tests.provisioner.test_intents import PLAIN
from tests.provisioner.test_offers import offer

BF16_70B = Workload(stored_gb=94, checkpoint_gb=94, checkpoint_every_s=600, critical_gb=94)
GB = st.floats(0.1, 2000)
MBPS = st.floats(50, 100_000)


def at(mbps: float | None, work: Workload = BF16_70B, price: Price | None = None) -> Forecast:
    one = offer(up_mbps=mbps, down_mbps=mbps, image_cached=True, price=price or Price(2.0))
    settings = RankSettings(comeback=Comeback(critical_gb=work.critical_gb))
    [ranked] = rank([one], settings)
    return forecast(ranked, work, disk_gb=200, prices=AWS_S3, comebacks_h=0.25)


def test_the_verdict_on_a_slow_link_says_what_would_work() -> None:
    assert verdict(at(500), BF16_70B) == "not at 0.5 Gbit/s: checkpoint every ≥ 40 min, or --min-up 2gbps"


def test_the_verdict_on_a_fast_link_says_what_a_loss_costs() -> None:
    figures = at(10_000)
    assert figures.feasible
    assert verdict(figures, BF16_70B) == "feasible at 10 Gbit/s: a preemption costs at most 15 min of training"


def test_overall_is_the_best_feasible_offer_or_the_fastest_links_excuse() -> None:
    assert overall((at(500), at(10_000)), BF16_70B).startswith("feasible at 10 Gbit/s")
    assert overall((at(100), at(500)), BF16_70B).startswith("not at 0.5 Gbit/s")
    assert overall((), BF16_70B) == "no offer to plan with"


def test_the_three_critical_sets_at_the_three_links() -> None:
    seconds = {
        (gb, mbps): rank([offer(down_mbps=mbps)], RankSettings(comeback=Comeback(critical_gb=gb)))[0].phases.critical_s
        for gb in (2.2, 94, 793)
        for mbps in (500, 1000, 10_000)
    }
    assert seconds[94, 10_000] == pytest.approx(75.2)
    assert seconds[94, 1000] == pytest.approx(752)
    assert seconds[793, 500] == pytest.approx(12_688)
    assert seconds[2.2, 10_000] == pytest.approx(1.76)


@given(GB, st.floats(30, 100_000))
def test_the_advice_is_feasible(checkpoint_gb: float, every_s: float) -> None:
    mbps = least_up_mbps(checkpoint_gb, every_s)
    assert least_every_s(checkpoint_gb, mbps) <= every_s * (1 + 1e-9)
    work = Workload(stored_gb=checkpoint_gb, checkpoint_gb=checkpoint_gb, checkpoint_every_s=every_s)
    assert at(mbps, work).feasible or least_every_s(checkpoint_gb, mbps) == pytest.approx(every_s)


@given(GB, MBPS, st.floats(60, 100_000))
def test_a_faster_link_is_never_worse(checkpoint_gb: float, mbps: float, every_s: float) -> None:
    work = Workload(checkpoint_gb, checkpoint_gb, every_s, critical_gb=checkpoint_gb)
    slow, fast = at(mbps, work), at(2 * mbps, work)
    assert fast.first_safe_s <= slow.first_safe_s
    assert fast.loss_max_s <= slow.loss_max_s + 1e-6
    assert fast.loss_mean_s <= fast.loss_max_s
    assert fast.feasible or not slow.feasible
    assert fast.phases.step_s <= slow.phases.step_s


def test_what_is_published_already_need_not_cross_again() -> None:
    half = Workload(stored_gb=94, checkpoint_gb=94, checkpoint_every_s=600, published_gb=94)
    assert at(500, half).first_safe_s == 30
    assert at(500).first_safe_s == pytest.approx(1504 + 30)


def test_the_hourly_price_has_all_its_parts() -> None:
    one = offer(price=Price(2.0, disk_usd_gb_month=0.72, up_usd_gb=0.01, down_usd_gb=0.02))
    cost = hourly(one, disk_gb=100, traffic=Traffic(50, 10), stored_gb=720, prices=AWS_S3)
    assert cost.disk_usd_h == pytest.approx(0.1)
    assert cost.bandwidth_usd_h == pytest.approx(0.7)
    assert cost.machine_usd_h == pytest.approx(2.8)
    assert cost.egress_usd_h == pytest.approx(0.9)
    assert cost.store_usd_h == pytest.approx(0.023 + 50 / 0.032 / 1000 * 0.005)
    assert cost.total_usd_h == pytest.approx(cost.machine_usd_h + cost.store_usd_h + cost.egress_usd_h)
    assert cost.per_month(cost.egress_usd_h) == pytest.approx(648)
    assert hourly(one, 100, Traffic(50, 10), 720, OWN).total_usd_h == pytest.approx(2.8)


@given(
    st.lists(
        st.builds(Stay, st.sampled_from("abc"), st.floats(0, 50), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()),
        max_size=10,
    )
)
def test_spending_adds_up(stays: list[Stay]) -> None:
    spent = spend(stays)
    assert sum(usd for _, usd in spent.by_intent) == pytest.approx(spent.total_usd)
    assert spent.nodes_usd >= 0
    assert spent.racing_usd >= 0


def test_a_record_says_how_long_it_was_paid_for() -> None:
    rented = IntentRecord(PLAIN, IntentState.RENTED, 2.0, ("i1",))
    assert stay_of(rented, 3601.0) == Stay("00c0ffee-1", 0.5, 1.0, 3601.0, won=False)
    won = advanced(advanced(rented, IntentState.WINNER, 10.0), IntentState.REAPING, 20.0)
    gone = advanced(won, IntentState.GONE, 31.0)
    assert stay_of(gone, 99.0) == Stay("00c0ffee-1", 0.5, 1.0, 31.0, won=True)
    never = advanced(IntentRecord(PLAIN, IntentState.UNKNOWN, 2.0), IntentState.GONE, 9.0)
    assert stay_of(never, 99.0) is None


def test_savings_and_the_race_budget() -> None:
    assert saved_percent(10.0, 4.0, 10.0) == 75.0
    assert saved_percent(50.0, 4.0, 10.0) == -25.0
    assert saved_percent(50.0, 4.0, 0.0) is None
    assert race_budget_usd(100.0, 7.0, share=0.02, least_usd=1.0) == 7.0
    assert recomputation_avoided_h([Loss(7200, 600), Loss(60, 600)]) == pytest.approx(6600 / 3600)


def test_ranked_offers_carry_what_the_plan_shows() -> None:
    figures = at(None)
    assert isinstance(figures.ranked, Ranked)
    assert figures.up_mbps == 500
    assert figures.phases.ready_s < figures.phases.step_s
