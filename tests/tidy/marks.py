"""Collect which test carries which mark, and keep the test column of docs/HISTORIES.md in step with it.

Run `python -m tests.tidy.marks` to see every promise and history with its tests, and with `--write` to update the page.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.sources import ROOT, name_of, tracked

HISTORIES = ROOT / "docs" / "HISTORIES.md"
SEMANTICS = ROOT / "docs" / "SEMANTICS.md"
NOT_YET = "not yet"
NAMED_MAX = 3

HISTORY_ROW = re.compile(r"^\| ([A-Z][0-9]+|M-[a-z]) \| (.+?) \| (.*?) \|$", re.MULTILINE)
PROMISE_ROW = re.compile(
    r"^\| (P-\d\d) \| (holds|weaker|not yet) \| (holds|weaker|not yet) \| (?:`(.+)`|\(.+\)) \|$", re.MULTILINE
)
PROMISE_STATEMENT = re.compile(r"^\*\*(P-\d\d) ", re.MULTILINE)


def marks_of(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (mark, id, test) for each promise or history mark on a function, a class or a whole module."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                decorators, test = node.decorator_list, f"{name_of(path)}::{node.name}"
            case ast.Assign(targets=[ast.Name(id="pytestmark")]):
                decorators, test = [node.value], name_of(path)
            case _:
                continue
        calls = [call for decorator in decorators for call in ast.walk(decorator) if isinstance(call, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in {"promise", "history"}:
                for argument in call.args:
                    yield call.func.attr, ast.literal_eval(argument), test


def tests_by_id(mark: str) -> dict[str, list[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in tracked("tests/*.py"):
        for kind, number, test in marks_of(path):
            if kind == mark:
                found[number].add(test)
    return {number: sorted(tests) for number, tests in sorted(found.items())}


def column(tests: list[str]) -> str:
    """Name the first tests of a history, in the form that the page uses."""
    named = [f"`{test.removeprefix('tests/')}`" for test in tests[:NAMED_MAX]]
    more = [f"and {len(tests) - NAMED_MAX} more"] if len(tests) > NAMED_MAX else []
    return "<br>".join(named + more) or NOT_YET


def with_tests(page: str, tests: dict[str, list[str]]) -> str:
    """Return *page* with every row's last cell replaced by what the marks say."""
    return HISTORY_ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {column(tests.get(row[1], []))} |", page)


def main() -> None:
    for mark in ("promise", "history"):
        for number, tests in tests_by_id(mark).items():
            print(f"{mark} {number}: {', '.join(tests)}")
    if "--write" in sys.argv:
        HISTORIES.write_text(with_tests(HISTORIES.read_text(), tests_by_id("history")))


if __name__ == "__main__":
    main()
