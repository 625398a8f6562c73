"""A job's report: its figures, and a page that needs nothing else and shows nothing secret."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from provisioner.cli import report_text
from provisioner.cli.facts import JobFacts
from provisioner.cli.history import History, document, history, training_spans
from provisioner.cli.report_html import page
from provisioner.core.happenings import Failover
from tests.support.job_history import BEGAN_S, HOUR_S, facts, failover

NOW_S = BEGAN_S + 12 * HOUR_S
VOID = {"meta", "br", "hr", "img", "input", "link"}


@pytest.fixture
def found() -> History:
    return history(facts(), NOW_S)


def test_the_figures_of_a_job(found: History) -> None:
    assert found.running
    # Nodes from order to end at $0.9: 4 h, 3 h, 2 h 2 min and 3 h; losers 89 s and 97 s.
    assert found.nodes_usd == pytest.approx(0.9 * (12 + 120 / 3600))
    assert found.racing_usd == pytest.approx(0.9 * (89 + 97) / 3600)
    # The command ran between comebacks and losses; the planned move overlaps, so nothing stands still for it.
    trained_s = 12 * HOUR_S - 74 - 74 - 220
    assert found.recomputed_h == pytest.approx((20 + 600) / 3600)
    assert found.useful_h == pytest.approx((trained_s - 620) / 3600)
    # Without another copy each loss would have thrown away everything until then.
    first_s, second_s = 4 * HOUR_S - 74, 7 * HOUR_S - 148
    assert found.avoided_h == pytest.approx((first_s - 20 + second_s - 600) / 3600)
    would_cost = 1.9 * found.useful_h
    assert found.saved_percent == pytest.approx(100 * (1 - found.total_usd / would_cost))


def test_a_planned_move_loses_nothing(found: History) -> None:
    assert [one.kind for one in found.losses] == ["loss", "drill"]
    spans = training_spans(found.failovers, NOW_S)
    assert spans[2][1] == spans[3][0] == BEGAN_S + 9 * HOUR_S + 74


def test_a_loss_without_a_winner_ends_the_training() -> None:
    failovers = (
        failover(1, "launch", 0, "00000001-1", None),
        replace(failover(2, "loss", HOUR_S, "x", "00000001-1"), winner=None, won_at_s=None, ready_s=None),
    )
    assert training_spans(failovers, NOW_S) == ((BEGAN_S + 74, BEGAN_S + HOUR_S),)


def test_a_job_that_has_ended_costs_nothing_more() -> None:
    ended = facts(running=False)
    now, later = history(ended, NOW_S), history(ended, NOW_S + 99 * HOUR_S)
    assert (now.running, now.exit_code) == (False, 0)
    assert later.total_usd == now.total_usd
    assert later.ended_s == NOW_S


def test_without_an_on_demand_price_nothing_is_claimed() -> None:
    known = facts()
    assert known.spec is not None
    bare = history(replace(known, spec=replace(known.spec, on_demand_usd_h=None)), NOW_S)
    assert bare.saved_percent is None
    assert "unknown: no on-demand price" in report_text.saved(bare)
    assert 'class="on-demand"' not in page(bare)


class Checker(HTMLParser):
    """Follows what is open; an end that closes something else is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> None:
    """Well-formed, and nothing in it leads anywhere or runs."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    names = {name for name, _ in checker.attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "onclick", "onload"}
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script", text)
    assert "nan" not in re.sub(r"[a-z]{3,}", lambda word: "" if word[0] != "nan" else word[0], text)


def test_the_page_is_whole_and_alone(found: History) -> None:
    text = page(found)
    check_page(text)
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert text.count("<svg") == 3
    for words in ("51 %", "10 h 45 min", "vast 00000001-1", "&lt;outbid&gt;", "python train.py --lr 1e-4"):
        assert words in text, words


def test_the_page_marks_losses_and_moves(found: History) -> None:
    text = page(found)
    assert text.count('class="mark lost"') == 2
    assert text.count('class="mark planned"') == 2
    assert text.count('class="flag"') == 2
    assert text.count(" loser") == 2 * len(found.bars[1].parts)


def test_a_job_without_any_history_has_a_page_too() -> None:
    bare = history(JobFacts("llama"), NOW_S)
    check_page(page(bare))
    assert json.loads(json.dumps(document(bare)))["failovers"] == []


NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)


@settings(max_examples=40)
@given(job=NAMES, why=NAMES, provider=NAMES)
def test_no_name_breaks_out_of_the_page(job: str, why: str, provider: str) -> None:
    known = facts()
    failovers = tuple(replace(one, why=why, provider=provider) for one in known.failovers)
    records = tuple(replace(one, why=why, intent=replace(one.intent, provider=provider)) for one in known.records)
    text = page(history(replace(known, job=job, failovers=failovers, records=records), NOW_S))
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_the_text_has_a_line_per_failover(found: History) -> None:
    console = Console(width=110, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report_text.view(found))
    shown = console.export_text()
    console.file.close()
    assert len([line for line in shown.splitlines() if re.match(r"(launch|loss|drill|move) \d ", line)]) == 4
    assert "51 % cheaper than on demand at $1.90 an hour" in shown


def test_json_has_what_the_page_has(found: History) -> None:
    made = json.loads(json.dumps({"ok": True, **document(found)}))
    assert made["failovers"][1]["ready_s"] == 74.0
    assert {"total", "nodes", "racing"} == set(made["usd"])
    assert set(Failover.__dataclass_fields__) == set(made["failovers"][0])
