"""Is what a run was started with kept without secrets, and compared fairly?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.provenance import (
    NAMED_MAX,
    NOTE_BYTES_MAX,
    Provenance,
    check_note,
    decode,
    differences,
    digest_of,
    encode,
    summary,
)
from spotwarp_fs.core.secrets import (
    MASK,
    is_secret_name,
    is_secret_value,
    masked_command,
    masked_text,
    split_environment,
)

RECORD = Provenance(
    command=("python", "train.py"),
    directory="/workspace",
    python="3.11.7",
    packages={"torch": "2.4.0", "numpy": "1.26"},
    git_commit="a" * 40,
    git_diff="+x",
    environment={"NCCL_DEBUG": "WARN", "HOSTNAME": "one"},
    secrets=("HF_TOKEN",),
    gpus=("H100", "H100"),
    driver="550.1",
)


@pytest.mark.promise("P-15")
@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "openaiApiKey", "DB_PASS", "SSH_AUTH_SOCK", "GITHUB_PAT",
     "SPOTWARP_S3_SECRET_ACCESS_KEY", "MYTOKEN", "COOKIE"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "PWD", "TOKENIZERS_PARALLELISM", "MONKEY", "NCCL_DEBUG", "KEYBOARD", "LR"])
def test_names_of_what_is_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.promise("P-15")
@pytest.mark.parametrize(
    "value",
    ["q8Zr1vT4kPx93LmWb7Yc", "9fceb02d0ae598e95dc970b74767f19372d61af8", "hf_NobodyMaySeeThisOne",
     "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "postgres://me:word@host/db",
     "x=ghp_0123456789abcdefgh",
     "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_values_that_look_like_secrets(value: str) -> None:
    assert is_secret_value(value)
    assert masked_text(f"before {value} after").startswith("before ")
    assert value not in masked_text(f"before {value} after")


@pytest.mark.parametrize(
    "value",
    ["meta-llama/Meta-Llama-3.1-8B-Instruct", "/usr/local/lib/python3.11/site-packages:/usr/bin", "20261201T101500Z",
     "checkpoint1234567", "MyDatasetLoaderForTraining", "tesla-v100-sxm2-32gb", "0,1,2,3,4,5,6,7", "3e-4", ""],
)  # fmt: skip
def test_values_that_do_not(value: str) -> None:
    assert not is_secret_value(value)
    assert masked_text(value) == value


def test_a_command_line_is_masked_by_names_and_by_looks() -> None:
    command = ["env", "DB_PASSWORD=x", "train", "--api-key", "k", "--token=t", "--lr=3e-4", "--auth", "--verbose"]
    expected = ("env", f"DB_PASSWORD={MASK}", "train", "--api-key", MASK, f"--token={MASK}", "--lr=3e-4", "--auth")
    assert masked_command(command) == (*expected, "--verbose")
    assert masked_command(["sh", "-c", "cd x; KEY=abc ./y"]) == ("sh", "-c", f"cd x; KEY={MASK} ./y")


@pytest.mark.promise("P-15")
def test_a_secret_of_the_environment_is_hidden_wherever_it_stands() -> None:
    assert masked_command(["curl", "http://host/?code=plain-words"], ["plain-words"]) == (
        "curl",
        f"http://host/?code={MASK}",
    )


def test_code_in_a_diff_stays_readable() -> None:
    diff = "-token = tokenizer.next_token()\n+api_key = 'abc'\n index 9fceb02..5de1a2b 100644\n"
    assert (
        masked_text(diff) == f"-token = tokenizer.next_token()\n+api_key = '{MASK}'\n index 9fceb02..5de1a2b 100644\n"
    )


@given(st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"), min_size=6))
def test_what_was_hidden_in_the_environment_is_in_no_text(secret: str) -> None:
    shown, names = split_environment({"API_KEY": secret, "HOME": "/home/me"})
    assert names == ("API_KEY",)
    assert shown == {"HOME": "/home/me"}
    assert secret not in masked_text(f"({secret})", [secret]).replace(MASK, "")


def test_a_record_comes_back_as_it_was() -> None:
    assert decode(encode(RECORD)) == RECORD
    newer = json.loads(encode(RECORD)) | {"of_a_later_version": 1}
    assert decode(json.dumps(newer).encode()) == RECORD
    assert digest_of(RECORD) != digest_of(replace(RECORD, python="3.12.0"))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"command": 1, "directory": "x"}', b"\xff", b'{"packages": []}'])
def test_what_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode(body)


def test_a_note_is_small() -> None:
    long = replace(RECORD, command=("python", *["--option"] * 1000), gpus=tuple(f"GPU {n}" for n in range(100)))
    note = summary(long)
    assert check_note(note) == note
    assert summary(RECORD)["gpu"] == "2 x H100"
    assert summary(RECORD)["git"] == "aaaaaaaaaaaa+changes"
    with pytest.raises(ValueError):
        check_note({"run": "x" * NOTE_BYTES_MAX})


def test_the_same_again_differs_in_nothing() -> None:
    assert differences(RECORD, RECORD) == []
    assert differences(RECORD, replace(RECORD, environment={"NCCL_DEBUG": "WARN", "HOSTNAME": "two"})) == []


def test_what_differs_is_named() -> None:
    packages = {"torch": "2.3.1", "numpy": "1.26", "extra": "1"}
    now = replace(RECORD, python="3.12.1", packages=packages, git_commit="b" * 40, git_diff="", gpus=("A100",))
    assert differences(RECORD, now) == [
        "Python: 3.11.7 before, 3.12.1 now",
        "git commit: aaaaaaaaaaaa before, bbbbbbbbbbbb now",
        "GPU: 2 x H100 before, 1 x A100 now",
        "uncommitted changes (git diff) are not the same",
        "package extra: absent before, 1 now",
        "package torch: 2.4.0 before, 2.3.1 now",
    ]
    assert differences(RECORD, replace(RECORD, gpus=())) == ["GPU: 2 x H100 before, none found now"]


def test_what_is_unknown_is_not_compared() -> None:
    assert differences(Provenance(RECORD.command, "/w"), replace(RECORD, environment={})) == []


def test_many_differences_are_counted() -> None:
    now = replace(RECORD, packages={f"p{n:02}": "1" for n in range(NAMED_MAX + 5)} | dict(RECORD.packages))
    lines = differences(RECORD, now)
    assert len(lines) == NAMED_MAX + 1
    assert lines[-1] == "and 5 more packages"
