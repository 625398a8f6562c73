"""Happenings become a screen: in any order, within limits, and in words that name what happened."""

from __future__ import annotations

import io
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from provisioner.cli.screen import GONE_MAX, SAID_MAX, Screen, event, plain, reduced
from provisioner.cli.screen_view import view
from provisioner.core.detect import Health
from provisioner.core.happenings import (
    CandidateMoved,
    FailoverEnded,
    Happening,
    Judged,
    NodeSaid,
    OffersSeen,
    Said,
    Spent,
)
from provisioner.core.race.state import Phase
from tests.support.job_history import BEGAN_S, failover

MOMENTS = st.floats(0, 1e6)
IDENTS = st.sampled_from([f"00c0ffee-{n}" for n in range(9)])
HAPPENINGS: st.SearchStrategy[Happening] = st.one_of(
    st.builds(OffersSeen, MOMENTS, st.dictionaries(st.sampled_from(["vast", "runpod"]), st.integers(0, 99))),
    st.builds(CandidateMoved, MOMENTS, IDENTS, st.just("vast"), st.sampled_from(Phase), st.floats(0, 9), st.text()),
    st.builds(Judged, MOMENTS, IDENTS, st.sampled_from(Health), st.text()),
    st.builds(NodeSaid, MOMENTS, IDENTS, st.sampled_from(["booted", "ready", "running"]), st.text()),
    st.builds(Said, MOMENTS, st.text()),
    st.builds(Spent, MOMENTS, st.floats(0, 99), st.floats(0, 9), st.floats(0, 9)),
    st.builds(
        FailoverEnded, MOMENTS, st.builds(lambda n: failover(n, "loss", 0, "00c0ffee-1", None), st.integers(1, 9))
    ),
)


def drawn(screen: Screen) -> str:
    shown = io.StringIO()
    Console(file=shown, width=120, highlight=False).print(view(screen))
    return shown.getvalue()


@settings(max_examples=40)
@given(st.lists(HAPPENINGS, max_size=60))
def test_any_happenings_in_any_order_can_be_shown(happenings: list[Happening]) -> None:
    screen = Screen("llama", 0.0, 0.0)
    for happening in happenings:
        before, screen = screen, reduced(screen, happening)
        assert screen.now_s >= before.now_s
        assert json.loads(json.dumps(event(happening)))["event"] == type(happening).__name__
        assert "\n" not in plain(Said(0.0, "x"))
    last = {h.ident: h for h in happenings if isinstance(h, CandidateMoved)}
    assert set(screen.candidates) == {ident for ident, moved in last.items() if moved.phase is not Phase.GONE}
    assert len(screen.said) <= SAID_MAX
    assert len(screen.gone) <= GONE_MAX
    assert "llama" in drawn(screen)


def story() -> list[Happening]:
    return [
        OffersSeen(1.0, {"vast": 12, "runpod": 3}),
        CandidateMoved(2.0, "00c0ffee-1", "vast", Phase.REQUESTED, 0.41),
        CandidateMoved(2.5, "00c0ffee-2", "runpod", Phase.REQUESTED, 0.6),
        CandidateMoved(4.0, "00c0ffee-1", "vast", Phase.BOOTING, 0.41),
        NodeSaid(30.0, "00c0ffee-1", "booted"),
        CandidateMoved(40.0, "00c0ffee-1", "vast", Phase.WINNER, 0.41),
        CandidateMoved(41.0, "00c0ffee-2", "runpod", Phase.REAPING, 0.6, "lost the race"),
        CandidateMoved(60.0, "00c0ffee-2", "runpod", Phase.GONE, 0.6, "lost the race"),
        Spent(61.0, 0.5, 0.02, 0.41),
        Judged(90.0, "00c0ffee-1", Health.SUSPECT, "no heartbeat for 15 s"),
    ]


def test_a_race_is_seen_from_offers_to_the_winner() -> None:
    screen = Screen("llama", 0.0, 0.0)
    for happening in story():
        screen = reduced(screen, happening)
    assert screen.holder is not None
    assert (screen.holder.ident, screen.holder.began_s, screen.holder.since_s) == ("00c0ffee-1", 2.0, 40.0)
    assert (screen.reaped, len(screen.gone)) == (1, 1)
    shown = drawn(screen)
    for words in (
        "$0.52 spent ($0.02 racing)",
        "suspect: no heartbeat for 15 s",
        "winner",
        "gone",
        "runpod 3, vast 12",
    ):
        assert words in shown, words


def test_a_line_says_what_happened() -> None:
    assert [plain(happening) for happening in story()[:4]] == [
        "00:00:01 offers: runpod 3, vast 12",
        "00:00:02 vast 00c0ffee-1: requested at $0.410/h",
        "00:00:02 runpod 00c0ffee-2: requested at $0.600/h",
        "00:00:04 vast 00c0ffee-1: booting",
    ]
    ended = FailoverEnded(BEGAN_S, failover(2, "loss", 0, "00c0ffee-1", None))
    assert plain(ended).endswith("loss 2: vast 00c0ffee-1 runs in 74.0 s; 2 of 3 reaped")


def test_a_candidate_that_comes_back_from_gone_counts_once() -> None:
    screen = Screen("llama", 0.0, 0.0)
    for phase in (Phase.GONE, Phase.REAPING, Phase.GONE):
        screen = reduced(screen, CandidateMoved(1.0, "00c0ffee-1", "vast", phase, 0.4))
    assert (screen.reaped, len(screen.gone), len(screen.candidates)) == (1, 1, 0)
