"""Read the project's own text: which files belong to it, and what comments and strings they hold."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    """List the files that git tracks or would add, so that build products and caches never count."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(path for name in set(names) if name and (path := ROOT / name).is_file())


def product_modules() -> list[Path]:
    """List what ships or is run by a user: the packages, the scripts and the stand-alone reader."""
    return tracked("spotwarp_fs/*.py", "provisioner/*.py", "scripts/*.py", "docs/*.py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string that a person may read: docstrings, messages, help."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of everything that a person reads in *path*, Python or Markdown."""
    if path.suffix == ".py":
        yield from comments(path)
        yield from strings(path)
    else:
        # What stands in a fence is a layout or a command, with its own narrow columns.
        yield 1, re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
