"""Does an empty or foreign directory never become the next state by accident, and does the refusal say what to do?"""

from __future__ import annotations

import itertools
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.guard import Identity, Side, Situation, Step, Wish, decide
from spotwarp_fs.core.ownnames import absent_inode, absent_target
from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import identity, leases
from spotwarp_fs.directory.identity import Owner, read_identity, settle, survey, write_identity
from tests.directory.test_restore import published
from tests.support.laid_out import OWNER, opened
from tests.support.world import WORKSPACE_ID, Node

NOTHING = Side(0, 0)
LOCAL = Side(3, 1_000, 60.0, ("a.txt", "b.txt"))
STATE = Side(10, 5 << 30, 3_600.0, ("run/checkpoint-9/model.safetensors",))
OURS = Identity(WORKSPACE_ID, "test", "file:///store", 1, "token")
SITUATION = Situation("/data/w", "test", WORKSPACE_ID, LOCAL, STATE, 42, None, "")
LOCALS = (NOTHING, LOCAL, replace(LOCAL, placeholders=2))
STATES = (None, NOTHING, STATE)
IDENTITIES = (
    None,
    OURS,
    replace(OURS, token="another"),
    replace(OURS, complete=False),
    replace(OURS, workspace_id="ffffffffffffffff", name="other"),
)


def outcome(found: Situation, wish: Wish) -> Step | str:
    try:
        return decide(found, wish)
    except UserError as error:
        return str(error) if error.exit_code is ExitCode.WOULD_WIPE else f"exit code {error.exit_code}"


def every_situation() -> list[Situation]:
    return [
        replace(SITUATION, local=local, state=state, identity=found, cache_token=token)
        for local, state, found, token in itertools.product(LOCALS, STATES, IDENTITIES, ("", "token"))
    ]


@pytest.mark.promise("P-18")
def test_only_adopt_local_lets_an_empty_or_foreign_directory_replace_a_state() -> None:
    for found in every_situation():
        ours = found.identity is not None and found.identity.workspace_id == WORKSPACE_ID
        known = ours and found.identity is not None and found.identity.token == found.cache_token
        for wish in (Wish.PLAIN, Wish.RESTORE):
            got = outcome(found, wish)
            if found.state == STATE and (not known or found.local == NOTHING):
                assert got is Step.LAY_OUT or isinstance(got, str), (found, wish, got)


@pytest.mark.promise("P-18")
def test_a_refusal_describes_both_sides_and_says_what_to_type() -> None:
    for found in every_situation():
        for wish in Wish:
            got = outcome(found, wish)
            if isinstance(got, str):
                assert found.directory in got
                assert "restore" in got or "--adopt-local" in got
                assert found.local.describe() in got or "is empty" in got
                if found.has_state and wish is Wish.PLAIN and (found.identity is None or found.is_ours):
                    assert STATE.describe() in got
                    assert "manifest 42" in got
                    assert "--restore" in got
                    assert "--adopt-local" in got


def test_unpublished_work_is_never_laid_over() -> None:
    """The cache's own directory, whole: what differs was made here, whatever the command line says."""
    own = replace(SITUATION, identity=OURS, cache_token="token")
    assert {decide(own, wish) for wish in Wish} == {Step.GO_ON}


def test_the_first_state_needs_no_wish() -> None:
    for state in (None, NOTHING):
        for local in (NOTHING, LOCAL):
            assert decide(replace(SITUATION, local=local, state=state), Wish.PLAIN) is Step.ADOPT
    assert "no state to restore" in str(outcome(replace(SITUATION, state=None), Wish.RESTORE))


def test_an_interrupted_restore_goes_on_by_itself_and_is_not_published() -> None:
    half = replace(SITUATION, identity=replace(OURS, complete=False))
    for token in ("", "token"):
        for local in LOCALS:
            found = replace(half, cache_token=token, local=local)
            assert decide(found, Wish.PLAIN) is decide(found, Wish.RESTORE) is Step.LAY_OUT
            assert "interrupted" in str(outcome(found, Wish.ADOPT))


def test_placeholders_cannot_be_adopted() -> None:
    found = replace(SITUATION, local=replace(LOCAL, placeholders=2))
    assert "2 of them without their bytes" in str(outcome(found, Wish.ADOPT))
    assert decide(found, Wish.RESTORE) is Step.LAY_OUT


def test_another_workspaces_directory_is_named() -> None:
    other = replace(SITUATION, identity=replace(OURS, workspace_id="ffffffffffffffff", name="other"))
    for wish in (Wish.PLAIN, Wish.RESTORE):
        assert "belongs to workspace other (ffffffffffffffff, file:///store)" in str(outcome(other, wish))
    assert decide(other, Wish.ADOPT) is Step.ADOPT


def test_the_identity_is_for_this_user_only_and_survives_a_round_trip(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    assert read_identity(root) is None
    (tmp_path / ".spotwarp").mkdir(0o777)
    write_identity(root, OURS)
    assert read_identity(root) == OURS
    assert stat.S_IMODE(os.lstat(tmp_path / ".spotwarp").st_mode) == 0o700
    assert json.loads((tmp_path / ".spotwarp/identity").read_text())["workspace_id"] == WORKSPACE_ID


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"workspace_id": "1"}', b"\xff"])
def test_a_damaged_identity_is_no_reason_to_go_on(tmp_path: Path, body: bytes) -> None:
    (tmp_path / ".spotwarp").mkdir()
    (tmp_path / ".spotwarp/identity").write_bytes(body)
    with pytest.raises(UserError, match="is damaged"):
        read_identity(os.fsencode(tmp_path))


def test_something_else_called_spotwarp_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".spotwarp").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        write_identity(os.fsencode(tmp_path), OURS)


def test_a_survey_counts_what_a_state_counts_and_finds_placeholders(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    write_identity(root, OURS)
    (tmp_path / "deep/er").mkdir(parents=True)
    assert survey(root, 0).empty
    (tmp_path / "deep/er/file").write_bytes(b"1234")
    os.utime(tmp_path / "deep/er/file", ns=(0, 5_000_000_000))
    (tmp_path / "link").symlink_to("deep")
    os.utime(tmp_path / "link", ns=(0, 1_000_000_000), follow_symlinks=False)
    absent = tmp_path / "absent"
    absent.symlink_to(os.fsdecode(absent_target(Inode(7))))
    with open(tmp_path / "placeholder", "wb") as file:
        file.truncate(1 << 20)
        leases.mark_absent(file.fileno(), "a session")
    found = survey(root, 65_000_000_000)
    assert found.files == 4
    assert found.placeholders == 2
    assert found.bytes == 4 + 4 + (1 << 20) + len(absent_target(Inode(7)))
    assert "deep/er/file" not in found.newest[:1]


def test_a_symlink_says_for_which_file_it_stands() -> None:
    assert absent_inode(absent_target(Inode(0x1_0000_0000_0007))) == 0x1_0000_0000_0007
    for other in (b"", b"absent/7", b".spotwarp/absent/7", b"/x/.spotwarp/absent/" + b"0" * 16):
        assert absent_inode(other) is None


@pytest.mark.promise("P-18")
async def test_a_directory_belongs_to_one_map_only(tmp_path: Path) -> None:
    """A copy of the directory, or another cache, is not taken for the one that was watched."""
    store, _ = await published()
    root, node = os.fsencode(tmp_path / "w"), Node()
    async with opened(store, tmp_path / "w", node=node) as restored:
        workspace = restored.session.workspace

        def step(wish: Wish) -> Step | str:
            return outcome(identity.situation(workspace, root, OWNER, number=1, cut_ns=0), wish)

        assert isinstance(step(Wish.PLAIN), str)
        assert step(Wish.ADOPT) is Step.ADOPT
        settle(workspace, root, OWNER, complete=True)
        (tmp_path / "w/file").touch()
        assert step(Wish.PLAIN) is Step.GO_ON
    async with opened(store, tmp_path / "w") as restored:
        workspace = restored.session.workspace
        assert "the cache that watched it is gone" in str(step(Wish.PLAIN))
        settle(workspace, root, OWNER, complete=True)
        assert step(Wish.PLAIN) is Step.GO_ON
    async with opened(store, tmp_path / "w", node=node) as restored:
        workspace = restored.session.workspace
        assert isinstance(step(Wish.PLAIN), str)
        (tmp_path / "w/file").unlink()
        settle(workspace, root, Owner(WORKSPACE_ID, "test", "elsewhere"), complete=True)
        assert "everything in it is gone" in str(step(Wish.PLAIN))
