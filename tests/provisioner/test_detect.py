"""Is a loss noticed in time, and never one that is none? In virtual time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core.detect import (
    DetectSettings,
    EndSeen,
    Health,
    HeartbeatRead,
    NoticeSeen,
    ProviderSaid,
    StoreFailed,
    Verdict,
    Watch,
    judge,
)
from provisioner.core.ports import InstanceStatus
from spotwarp_fs.cli.daemon import WATCHED_HEARTBEAT_S

RUNNING, STOPPED, GONE = InstanceStatus.RUNNING, InstanceStatus.STOPPED, InstanceStatus.GONE
READ_EVERY_S, BEAT_EVERY_S, LIST_EVERY_S = 2.0, 5.0, 3.0
DAY_S = 86_400.0


def seconds_in(outages: list[tuple[float, float]]) -> set[float]:
    return {float(second) for start, stop in outages for second in range(math.ceil(start), math.ceil(stop))}


class Life:
    """A node, a store and a provider in virtual time, as a controller sees them."""

    def __init__(self, dies_at_s: float = float("inf"), provider_lag_s: float = 10.0) -> None:
        self.dies_at_s = dies_at_s
        self.provider_lag_s = provider_lag_s
        self.outages: list[tuple[float, float]] = []
        """When neither the node nor the controller reaches the store."""
        self.node_outages: list[tuple[float, float]] = []
        self.unlisted: set[int] = set()
        """Listings, by number, in which the row is missing."""
        self.wrong: list[tuple[float, float]] = []
        """When the provider's word lags behind and it still says stopped."""
        self.watch = Watch()
        self.beat = 0
        self.now_s = 0.0
        self.verdicts: list[tuple[float, Verdict]] = []

    def run(self, until_s: float) -> None:
        out, node_out = seconds_in(self.outages), seconds_in(self.outages + self.node_outages)
        wrong = seconds_in(self.wrong)
        while self.now_s < until_s:
            self.now_s += 1.0
            alive = self.now_s < self.dies_at_s
            if alive and self.now_s % BEAT_EVERY_S == 0 and self.now_s not in node_out:
                self.beat += 1
            if self.now_s % READ_EVERY_S == 0:
                failed = self.now_s in out
                self.watch = self.watch.observe(
                    StoreFailed(self.now_s) if failed else HeartbeatRead(self.now_s, str(self.beat))
                )
            if self.now_s % LIST_EVERY_S == 0:
                shown_alive = self.now_s < self.dies_at_s + self.provider_lag_s and self.now_s not in wrong
                missing = int(self.now_s // LIST_EVERY_S) in self.unlisted
                said = None if missing else RUNNING if shown_alive else STOPPED
                self.watch = self.watch.observe(ProviderSaid(self.now_s, said))
            verdict = judge(self.watch, self.now_s)
            if not self.verdicts or verdict.health is not self.verdicts[-1][1].health:
                self.verdicts.append((self.now_s, verdict))

    def first(self, health: Health) -> float | None:
        return next((at_s for at_s, verdict in self.verdicts if verdict.health is health), None)


@pytest.mark.parametrize("dies_at_s", [100.0, 101.0, 102.0, 103.0, 104.0])
def test_a_confirmed_loss_is_decided_in_15_s(dies_at_s: float) -> None:
    life = Life(dies_at_s, provider_lag_s=1.0)
    life.run(200)
    lost_s = life.first(Health.LOST)
    assert lost_s is not None
    assert lost_s - dies_at_s <= 15
    assert "stopped" in life.verdicts[-1][1].why


def test_a_slow_provider_confirms_when_it_speaks() -> None:
    life = Life(100.0, provider_lag_s=40.0)
    life.run(200)
    suspect_s, lost_s = life.first(Health.SUSPECT), life.first(Health.LOST)
    assert suspect_s is not None
    assert lost_s is not None
    assert 110 <= suspect_s <= 120
    assert 140 <= lost_s <= 144


def test_a_silent_heartbeat_alone_races_at_15_s_and_claims_at_75_s() -> None:
    life = Life(100.0, provider_lag_s=1e9)
    life.run(300)
    suspect_s, lost_s = life.first(Health.SUSPECT), life.first(Health.LOST)
    assert suspect_s is not None
    assert lost_s is not None
    # Counted from the read that first saw the last heartbeat, which is up to a read later than the heartbeat.
    assert 110 <= suspect_s <= 117
    assert 170 <= lost_s <= 177


def test_a_store_that_is_out_decides_nothing() -> None:
    life = Life(100.0, provider_lag_s=1.0)
    life.outages = [(98.0, 1000.0)]
    life.run(999)
    assert life.first(Health.LOST) is None
    assert life.verdicts[-1][1].health is Health.BLIND
    life.run(1035)
    assert life.verdicts[-1][1].health is Health.LOST


def test_a_node_that_dies_in_an_outage_is_found_soon_after_it() -> None:
    life = Life(120.0, provider_lag_s=1e9)
    life.outages = [(100.0, 160.0)]
    life.run(400)
    lost_s = life.first(Health.LOST)
    assert lost_s is not None
    assert 160 + 75 <= lost_s <= 160 + 95


def test_a_node_that_cannot_reach_the_store_for_60_s_is_not_taken_over() -> None:
    life = Life()
    life.node_outages = [(100.0, 160.0)]
    life.run(300)
    assert life.first(Health.SUSPECT) is not None
    assert life.first(Health.LOST) is None
    assert life.verdicts[-1][1].health is Health.HEALTHY


@pytest.mark.parametrize("seed", range(2))
def test_24_hours_of_outages_and_lag_give_no_false_takeover(seed: int) -> None:
    drawn = random.Random(seed)
    life = Life()
    for start_s in range(600, int(DAY_S), 600):
        shift_s = drawn.uniform(0, 300)
        begin_s = start_s + shift_s
        # Both lose the store for 60 s; the node may lose it a little earlier and come back up to 10 s later.
        life.outages.append((begin_s, begin_s + 60))
        life.node_outages.append((begin_s - drawn.uniform(0, 5), begin_s + 60 + drawn.uniform(0, 10)))
        lag_s = start_s + drawn.uniform(0, 600)
        life.wrong.append((lag_s, lag_s + drawn.uniform(0, 60)))
    # A listing in ten lacks the row, never two in a row.
    numbers = drawn.sample(range(0, int(DAY_S / LIST_EVERY_S), 2), int(DAY_S / LIST_EVERY_S / 10))
    life.unlisted = set(numbers)
    life.run(DAY_S)
    assert life.first(Health.BLIND) is not None
    assert life.first(Health.LOST) is None, life.verdicts
    # A race that is called off costs money too: few of 143 outages and as many wrong words start one.
    assert sum(verdict.health is Health.SUSPECT for _, verdict in life.verdicts) <= 10


def test_a_providers_wrong_word_is_harmless_while_the_heart_beats() -> None:
    watch = Watch()
    for second in range(0, 200, 2):
        watch = watch.observe(HeartbeatRead(float(second), str(second // 5)))
        watch = watch.observe(ProviderSaid(float(second), STOPPED if second % 3 else None))
        assert judge(watch, float(second)).health is Health.HEALTHY


def test_an_old_word_of_the_provider_says_nothing() -> None:
    watch = Watch().observe(HeartbeatRead(0.0, "1")).observe(ProviderSaid(0.0, STOPPED))
    for second in range(2, 60, 2):
        watch = watch.observe(HeartbeatRead(float(second), "1"))
    assert judge(watch, 58.0).health is Health.SUSPECT
    assert judge(watch.observe(ProviderSaid(58.0, STOPPED)), 58.0).health is Health.LOST


def test_two_listings_without_it_confirm_and_one_does_not() -> None:
    watch = Watch()
    for second in range(0, 16, 2):
        watch = watch.observe(HeartbeatRead(float(second), "1"))
    once = watch.observe(ProviderSaid(12.0, RUNNING)).observe(ProviderSaid(13.0, None))
    assert judge(once, 14.0).health is Health.HEALTHY
    assert judge(once.observe(ProviderSaid(14.0, GONE)), 14.0).health is Health.LOST
    assert judge(once.observe(ProviderSaid(14.0, RUNNING)), 14.0).health is Health.HEALTHY


def test_a_notice_races_at_once_and_claims_after_the_drain() -> None:
    watch = Watch().observe(HeartbeatRead(100.0, "1")).observe(NoticeSeen(100.0, 105.0))
    assert judge(watch, 101.0).health is Health.SUSPECT
    for second in range(102, 114, 2):
        watch = watch.observe(HeartbeatRead(float(second), "1"))
    assert judge(watch, 112.0).health is Health.LOST
    moving = watch.observe(HeartbeatRead(113.0, "2"))
    assert judge(moving, 113.0).health is Health.SUSPECT
    assert judge(watch.observe(EndSeen(103.0)), 110.0).health is Health.LOST


def test_a_controller_that_slept_has_seen_nothing() -> None:
    watch = Watch().observe(HeartbeatRead(0.0, "1")).observe(HeartbeatRead(3600.0, "1"))
    assert judge(watch, 3600.0).health is Health.HEALTHY
    assert judge(Watch(), 5.0).health is Health.BLIND


SEEN = st.lists(
    st.one_of(
        st.builds(HeartbeatRead, st.integers(0, 300).map(float), st.sampled_from("abc")),
        st.builds(StoreFailed, st.integers(0, 300).map(float)),
        st.builds(ProviderSaid, st.integers(0, 300).map(float), st.sampled_from([None, RUNNING, STOPPED])),
    ),
    max_size=80,
)


@given(SEEN, st.integers(0, 400))
def test_claims_need_a_fresh_read_and_a_heart_that_was_seen_to_stand_still(seen: list[object], now_s: int) -> None:
    watch = Watch()
    for one in seen:
        watch = watch.observe(one)  # type: ignore[arg-type]
        assert watch.observe(one) == watch or isinstance(one, StoreFailed)  # type: ignore[arg-type]
    verdict = judge(watch, float(now_s))
    if verdict.claim:
        assert now_s - watch.read_at_s <= DetectSettings().blind_after_s
        assert watch.stale_s >= DetectSettings().confirm_stale_s
        assert verdict.race


def test_the_limits_fit_the_pace_at_which_a_rented_node_beats() -> None:
    settings = DetectSettings()
    assert settings.overdue_s > WATCHED_HEARTBEAT_S, "one that comes in time is not overdue"
    assert settings.confirm_stale_s > 2 * WATCHED_HEARTBEAT_S, "one that was lost on its way confirms nothing"
