"""Do the pages tell the truth about the tests? SEMANTICS, HISTORIES and the marks that tests carry, compared."""

from tests.tidy import marks
from tests.tidy.marks import HISTORIES, HISTORY_ROW, PROMISE_ROW, PROMISE_STATEMENT, SEMANTICS, with_tests
from tests.tidy.sources import ROOT

PROMISES = {f"P-{number:02}" for number in range(1, 19)}


def matrix() -> dict[str, str]:
    return {row[1]: row[2] for row in PROMISE_ROW.finditer(SEMANTICS.read_text())}


def test_every_promise_is_stated_once_and_has_a_row() -> None:
    stated = PROMISE_STATEMENT.findall(SEMANTICS.read_text())
    assert sorted(stated) == sorted(PROMISES)
    assert matrix().keys() == PROMISES


def test_no_test_names_a_promise_that_is_not_made() -> None:
    assert marks.tests_by_id("promise").keys() <= PROMISES


def test_a_promise_is_said_to_hold_exactly_if_a_test_holds_it() -> None:
    said_to_hold = {number for number, word in matrix().items() if word != "not yet"}
    untested = said_to_hold - marks.tests_by_id("promise").keys()
    assert not untested, f"SEMANTICS says these hold, but no test carries their number: {sorted(untested)}"


def test_the_tests_of_the_directory_form_exist() -> None:
    for row in PROMISE_ROW.finditer(SEMANTICS.read_text()):
        if row[4] is not None:
            path, _, test = row[4].partition("::")
            found = ROOT / "tests" / path
            assert found.exists(), f"{row[1]}: there is no {path}"
            assert not test or f"def {test}(" in found.read_text(), f"{row[1]}: {path} has no {test}"


def test_no_test_names_an_unknown_history() -> None:
    known = {row[1] for row in HISTORY_ROW.finditer(HISTORIES.read_text())}
    assert len(known) == 69
    assert marks.tests_by_id("history").keys() <= known


def test_the_histories_page_names_the_tests_that_replay_them() -> None:
    page = HISTORIES.read_text()
    assert page == with_tests(page, marks.tests_by_id("history")), "run: python -m tests.tidy.marks --write"
