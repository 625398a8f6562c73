from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.policies import ATOMIC_FILES, NameGlobs, PathGlobs, Policies

names = st.binary(min_size=1, max_size=12).filter(lambda name: b"/" not in name and b"\0" not in name)
plain_names = st.text("ab.-_1é", min_size=1, max_size=8)


@pytest.mark.parametrize("name", [b"model.pt", b".model.safetensors", b"__0_0.distcp", b"\xff.bin", b".ckpt"])
def test_checkpoint_files_are_atomic(name: bytes) -> None:
    assert Policies().is_atomic(name)


@pytest.mark.parametrize("name", [b"model.pt.tmp", b"log.txt", b"MODEL.PT", b"pt", b"bin", b"events.out"])
def test_other_files_are_not_atomic(name: bytes) -> None:
    assert not Policies().is_atomic(name)


@pytest.mark.parametrize(
    "name", [b"checkpoint-1", b"step-5", b"step_5", b"global_step100", b"epoch-1", b"iter_0000010"]
)
def test_checkpoint_directories_are_atomic(name: bytes) -> None:
    assert Policies().is_atomic_dir(name)


@pytest.mark.parametrize("name", [b"checkpoints", b"step5", b"my-checkpoint-1", b"epoch", b"steps"])
def test_other_directories_are_not_atomic(name: bytes) -> None:
    assert not Policies().is_atomic_dir(name)


@pytest.mark.parametrize(
    ("path", "scratch"),
    [
        (b".cache/pip", True),
        (b".cache/pip/http/a/b", True),
        (b"home/me/.cache/uv/x", True),
        (b".cache", False),
        (b".cache/pipx", False),
        (b".cache/huggingface/x", False),
        (b"my.cache/pip", False),
        (b"pip", False),
    ],
)
def test_package_caches_are_scratch_and_their_neighbours_are_not(path: bytes, scratch: bool) -> None:
    assert Policies().is_scratch(path) is scratch


@pytest.mark.parametrize(
    ("glob", "path", "covered"),
    [
        ("wandb", b"a/wandb/run/x", True),
        ("/wandb", b"a/wandb/run", False),
        ("/wandb", b"wandb/run", True),
        ("a/**/z", b"a/z", True),
        ("a/**/z", b"q/a/b/c/z/deep", True),
        ("a/**", b"a", False),
        ("a/**", b"a/b", True),
        ("a/*/z", b"a/b/c/z", False),
        ("tmp?", "tmpé".encode(), True),
        ("tmp?", b"tmp/x", False),
        ("[!a]x", b"bx", True),
        ("[!a]x", b"ax", False),
        ("[!a]", b"b/x", True),
        ("a[b", b"a[b", True),
        ("x[]]y", b"x]y", True),
    ],
)
def test_path_globs(glob: str, path: bytes, covered: bool) -> None:
    assert PathGlobs([glob]).covers(path) is covered


@given(st.lists(st.text("ab*?.[]!-é", min_size=1, max_size=6), max_size=4), plain_names)
def test_name_globs_agree_with_fnmatch(globs: list[str], name: str) -> None:
    # An unclosed set and `[^` are read differently there, and sets are compared above.
    assume(all("[" not in glob and "**" not in glob for glob in globs))
    assert NameGlobs(globs).matches(name.encode()) == any(fnmatchcase(name, glob) for glob in globs)


@given(st.text("ab*?[]!-^\\&~|.", min_size=1, max_size=8), names)
def test_any_glob_compiles_or_is_refused_by_name(glob: str, name: bytes) -> None:
    complaint = None
    try:
        NameGlobs([glob]).matches(name)
    except UserError as error:
        complaint = str(error)
    assert complaint is None or repr(glob) in complaint


@given(names, st.lists(names, max_size=3))
def test_what_covers_a_directory_covers_all_below(name: bytes, below: list[bytes]) -> None:
    globs = PathGlobs(["*.tmp", "a*"])
    if globs.covers(name):
        assert globs.covers(b"/".join([name, *below]))


@given(names)
def test_names_that_are_not_utf8_keep_their_suffix(name: bytes) -> None:
    policies = Policies()
    for glob in ATOMIC_FILES:
        assert policies.is_atomic(name + glob[1:].encode())


def test_the_shortest_interval_that_covers_a_path_wins() -> None:
    policies = Policies.build(interval_s=30, intervals={"logs": 5, "*.log": 600, "/big": 120})
    assert policies.interval_for(b"x/y") == 30
    assert policies.interval_for(b"x/y.log") == 600
    assert policies.interval_for(b"logs/y.log") == 5
    assert policies.interval_for(b"x/big/f") == 30
    assert policies.interval_for(b"big/f") == 120


@pytest.mark.parametrize("glob", ["", "/", "//"])
def test_a_glob_for_the_whole_workspace_is_refused(glob: str) -> None:
    with pytest.raises(UserError, match="not a glob"):
        PathGlobs([glob])


def test_a_policy_of_names_refuses_a_path() -> None:
    with pytest.raises(UserError, match="has a slash"):
        NameGlobs(["models/*.pt"])
