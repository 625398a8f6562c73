"""Do the pages say what the code does? Links, commands, exit codes and settings, compared with the code."""

import re

from spotwarp_fs.cli.main import COMMANDS as OWN
from spotwarp_fs.cli.plugins import find_plugins
from spotwarp_fs.cli.settings import KEYS
from spotwarp_fs.core.errors import ExitCode
from tests.tidy.sources import ROOT, name_of, tracked

COMMANDS = {*OWN, *(name for name, (_, short) in find_plugins().commands.items() if short)}
"""Of the filesystem and of the packages that add some; what has no help is not listed anywhere."""

LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
EXIT_CODE_ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def test_relative_links_lead_somewhere() -> None:
    pages = tracked("*.md")
    broken = [
        f"{name_of(page)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert ROOT / "README.md" in pages
    assert not broken, "\n".join(broken)


def test_readme_lists_every_command() -> None:
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {word.split()[0] for row in table for word in re.findall(r"`([^`]+)`", row)}
    assert listed == set(COMMANDS)


def test_pages_speak_only_of_commands_that_exist() -> None:
    for page in ("README.md", "docs/OPERATIONS.md", "docs/SEMANTICS.md"):
        spoken_of = set(re.findall(r"\bspotwarp ([a-z]+)\b", (ROOT / page).read_text()))
        assert spoken_of <= set(COMMANDS), page


def test_operations_explains_every_exit_code() -> None:
    codes = {int(code) for code in EXIT_CODE_ROW.findall((ROOT / "docs" / "OPERATIONS.md").read_text())}
    assert codes == {int(code) for code in ExitCode}


def test_every_setting_says_what_it_is_for() -> None:
    silent = [key for key, info in KEYS.items() if not (info.description or "").endswith((".", "):"))]
    assert KEYS
    assert not silent
