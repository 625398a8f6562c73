"""Can what the pages tell people to type be typed? Each `spotwarp …` line in a shell block names options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from spotwarp_fs.cli.main import cli
from tests.tidy.sources import ROOT, name_of, tracked

PAGES = [ROOT / "README.md", ROOT / "docs" / "OPERATIONS.md", *tracked("docs/nodes/*.md")]
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENDS = {"&&", "||", ";", "|", "&"}


def spotwarp_lines(text: str) -> list[list[str]]:
    """Give the arguments of each call of spotwarp in the shell blocks of a page, without what comes after `--`."""
    found = []
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for at in [at for at, word in enumerate(words) if word == "spotwarp"]:
                call = words[at + 1 :]
                ends = [index for index, word in enumerate(call) if word in ENDS or word == "--"]
                found.append(call[: ends[0]] if ends else call)
    return found


def complaint(arguments: list[str]) -> str:
    """Say what click finds wrong with a call, by the command's own parser; nothing is run."""
    try:
        name, command, rest = cli.resolve_command(click.Context(cli), arguments)
        assert command is not None
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(click.Context(command), rest)
            assert command is not None
        command.make_context(name, rest, resilient_parsing=False)
    except click.ClickException as error:
        return f"spotwarp {shlex.join(arguments)}: {error.format_message()}"
    return ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("spotwarp start --workspace X --restore", ""),
        ("AWS_PROFILE=x spotwarp mount /w && spotwarp umount /w", ""),
        ("spotwarp run --script x.py -- --no-such-option", ""),
        ("spotwarp snapshot create NAME --workspace w", ""),
        ("spotwarp start --directory X", "--directory"),
        ("spotwarp mount", "MOUNTPOINT"),
        ("spotwarp launch", "launch"),
        ("docker run image spotwarp run --form x -- true", "--form"),
    ],
)
def test_the_rule_tells_right_from_wrong(line: str, words: str) -> None:
    calls = spotwarp_lines(f"```sh\n{line}\n```")
    assert calls
    said = "".join(complaint(call) for call in calls)
    assert words in said
    assert bool(words) == bool(said)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_line_that_a_page_tells_to_type_parses(page: Path) -> None:
    said = [text for call in spotwarp_lines(page.read_text()) if (text := complaint(call))]
    assert not said, "\n".join(said)


def test_the_pages_of_all_nodes_are_looked_at() -> None:
    nodes = [page for page in PAGES if page.parent.name == "nodes"]
    assert len(nodes) >= 7
    assert all(spotwarp_lines(page.read_text()) for page in [ROOT / "README.md", *nodes])
