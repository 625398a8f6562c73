"""Does the project speak one language? Words of the glossary that are easily confused, in code, messages and docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.sources import name_of, product_modules, prose, tracked

# "epoch" alone belongs to training; ours is the writer epoch. What may stand before or after the word otherwise:
# "training epoch", Unix time's "since the epoch", a glob such as epoch[-_]*, a field such as writer_epoch, and the
# narrow cells of a byte diagram or a template (<epoch, | epoch).
BARE_EPOCH = re.compile(
    r"(?<!writer )(?<!writers' )(?<!training )(?<!since the )(?<!\| )(?<!<)(?<![\w-])epochs?\b(?![\[\w*-])",
    re.IGNORECASE,
)

# "checkpoint" belongs to the model; a published state kept by name is a snapshot.
SNAPSHOT_CALLED_CHECKPOINT = re.compile(
    r"(create|publish|seal|delete|list|mount|named|restore)_checkpoints?\b|\bcheckpoint_(manifest|number)\b"
    r"|\b(publish|seal|mount)(es|s|ed|ing)? (a|the) checkpoint\b",
    re.IGNORECASE,
)


def read_by_people() -> list[Path]:
    return tracked("spotwarp_fs/*.py", "provisioner/*.py", "docs/*.md", "README.md", "CHANGELOG.md")


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what other modules see: functions, classes, parameters and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg(annotation=ast.Name(id="WriterEpoch")):
                pass  # its type says whose
            case ast.arg():
                yield node.lineno, node.arg
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("a manifest with a raised writer epoch", False),
        ("the writer epochs never fall", False),
        ("seconds since the epoch", False),
        ("`epoch[-_]*` and epoch-* directories", False),
        ("writer_epoch=3", False),
        ("packs/<epoch 8 hex>-<ident>", False),
        ("an epoch was raised", True),
        ("Epoch 3 is fenced", True),
    ],
)
def test_the_rule_tells_them_apart(text: str, *, bare: bool) -> None:
    assert bool(BARE_EPOCH.search(text)) is bare


def test_an_epoch_says_whose() -> None:
    found = [
        f"{name_of(path)}:{line} …{text[max(0, hit.start() - 40) : hit.end() + 20]}…"
        for path in read_by_people()
        for line, raw in prose(path)
        for text in [flat(raw)]
        for hit in BARE_EPOCH.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_public_names_say_whose_epoch() -> None:
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in product_modules()
        for line, name in identifiers(ast.parse(path.read_text()))
        if re.fullmatch(r"_?epochs?(_.*)?", name)
    ]
    assert not found, "\n".join(found)


def test_checkpoints_belong_to_the_model() -> None:
    found = []
    for path in read_by_people():
        found += [
            f"{name_of(path)}:{line} {text}" for line, text in prose(path) if SNAPSHOT_CALLED_CHECKPOINT.search(text)
        ]
        if path.suffix == ".py":
            names = identifiers(ast.parse(path.read_text()))
            found += [f"{name_of(path)}:{n} {name}" for n, name in names if SNAPSHOT_CALLED_CHECKPOINT.search(name)]
    assert not found, "a published state kept by name is a snapshot:\n" + "\n".join(found)
