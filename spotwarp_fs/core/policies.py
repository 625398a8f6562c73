"""Decide by glob what is atomic, what is scratch, and how soon a change asks for a cut.

Globs are the shell's: `*` and `?` stop at a slash, `[ab]` and `[!ab]` are sets, `**` stands for any number of
directories; names are case-sensitive and a leading dot is nothing special. A glob without a slash is compared with a
name, wherever it is; a glob with a slash with the end of a path (`.cache/pip` is also `home/me/.cache/pip`); with a
slash in front, with the whole path from the workspace's root. Invariant: the same names and globs always give the same
answer; no state is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from spotwarp_fs.core.errors import UserError

ATOMIC_FILES: Final = ("*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.bin", "*.distcp", "*.npz", "*.h5")
ATOMIC_DIRECTORIES: Final = ("checkpoint-*", "step[-_]*", "global_step*", "epoch[-_]*", "iter_*")
SCRATCH: Final = (".cache/pip", ".cache/uv")

_PIECE: Final = re.compile(r"\*\*/|/\*\*(?=\Z)|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)
_SPECIAL: Final = frozenset("*?[")
_SUFFIX_GLOB: Final = re.compile(r"\*[^*?\[/]+")


def _regex(glob: str) -> str:
    """Translate one glob; an unclosed bracket is an ordinary character, as in the shell."""
    pieces = []
    for piece in _PIECE.findall(glob):
        match piece:
            case "**/":
                pieces.append(r"(?:[^/]+/)*")
            case "/**":
                pieces.append(r"/.+")
            case "**" | "*":
                pieces.append(r"[^/]*")
            case "?":
                pieces.append(r"[^/]")
            case _ if len(piece) > 2:
                pieces.append(_character_set(piece[1:-1]))
            case _:
                pieces.append(re.escape(piece))
    return "".join(pieces)


def _character_set(inside: str) -> str:
    """Translate the inside of a bracket; `-` keeps its meaning between two characters."""
    negated = inside.startswith("!")
    body = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside[negated:])
    return f"(?!/)[{'^' if negated else ''}{body}]"


def _text(name: bytes) -> str:
    """Decode so that `?` means a character; bytes that are not UTF-8 count one each."""
    return name.decode("utf-8", "surrogateescape")


def _compile(expression: str, globs: tuple[str, ...]) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise UserError(f"a glob among {', '.join(map(repr, globs))} cannot be read: {error}") from error


def _checked(globs: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(globs)
    for glob in checked:
        if not glob.strip("/"):
            raise UserError(f"{glob!r} is not a glob: it would match nothing or the whole workspace")
    return checked


def _parts(glob: str) -> list[str]:
    """The names that a path glob speaks of; `**/` in front says nothing, and behind a name it reaches beyond it."""
    parts = [part for part in glob.split("/") if part]
    if any(part.endswith("**") and part != "**" for part in parts[:-1]):
        return ["*", "*"]
    while len(parts) > 1 and parts[0] == "**":
        del parts[0]
    return parts


class NameGlobs:
    """Globs for single names; most are `*.suffix` or a plain name, which need no expression."""

    __slots__ = ("_literals", "_pattern", "_suffixes", "globs")

    def __init__(self, globs: Iterable[str]) -> None:
        self.globs = _checked(globs)
        for glob in self.globs:
            if "/" in glob:
                raise UserError(f"{glob!r} has a slash, but this policy goes by names: write only the last part")
        suffix_globs = [glob for glob in self.globs if _SUFFIX_GLOB.fullmatch(glob)]
        literals = [glob for glob in self.globs if not _SPECIAL.intersection(glob)]
        others = [_regex(glob) for glob in self.globs if glob not in suffix_globs and glob not in literals]
        self._suffixes = tuple(glob[1:].encode("utf-8", "surrogateescape") for glob in suffix_globs)
        self._literals = frozenset(glob.encode("utf-8", "surrogateescape") for glob in literals)
        self._pattern = _compile("|".join(others), self.globs) if others else None

    def matches(self, name: bytes) -> bool:
        """Tell whether any glob matches *name*."""
        if name in self._literals or name.endswith(self._suffixes):
            return True
        return self._pattern is not None and self._pattern.fullmatch(_text(name)) is not None


class PathGlobs:
    """Globs for paths relative to the workspace's root, and for everything below what they match."""

    __slots__ = ("_below", "_exact", "_last", "_passed", "globs")

    def __init__(self, globs: Iterable[str]) -> None:
        self.globs = _checked(globs)
        anchored = [
            _regex(g.strip("/")) if g.startswith("/") else rf"(?:.*/)?{_regex(g.strip('/'))}" for g in self.globs
        ]
        either = "|".join(anchored)
        self._exact = _compile(either, self.globs) if anchored else None
        self._below = _compile(rf"(?:{either})(?:/.*)?", self.globs) if anchored else None
        parts = [_parts(glob) for glob in self.globs]
        self._last = NameGlobs(part[-1] for part in parts)
        self._passed = NameGlobs(name for part in parts for name in part[:-1])

    def may_end(self, name: bytes) -> bool:
        """Tell cheaply whether a path that ends in *name* could be one that a glob matches."""
        return self._last.matches(name)

    def may_pass(self, name: bytes) -> bool:
        """Tell whether a directory's name can decide about what is below it, though no glob matches the directory."""
        return self._passed.matches(name)

    def matches(self, path: bytes) -> bool:
        """Tell whether a glob matches *path* itself (`a/b`, no slash in front)."""
        return self._exact is not None and self._exact.fullmatch(_text(path)) is not None

    def covers(self, path: bytes) -> bool:
        """Tell whether a glob matches *path* or a directory above it."""
        return self._below is not None and self._below.fullmatch(_text(path)) is not None


@dataclass(frozen=True, slots=True)
class Policies:
    """What the owner of the workspace wants, compiled once per mount."""

    atomic: NameGlobs = field(default_factory=lambda: NameGlobs(ATOMIC_FILES))
    atomic_dirs: NameGlobs = field(default_factory=lambda: NameGlobs(ATOMIC_DIRECTORIES))
    scratch: PathGlobs = field(default_factory=lambda: PathGlobs(SCRATCH))
    interval_s: float = 30.0
    intervals: tuple[tuple[PathGlobs, float], ...] = ()

    @classmethod
    def build(
        cls,
        *,
        atomic: Iterable[str] = ATOMIC_FILES,
        atomic_dirs: Iterable[str] = ATOMIC_DIRECTORIES,
        scratch: Iterable[str] = SCRATCH,
        interval_s: float = 30.0,
        intervals: Mapping[str, float] | None = None,
    ) -> Policies:
        """Compile the globs, or raise UserError naming the one that cannot be read."""
        return cls(
            atomic=NameGlobs(atomic),
            atomic_dirs=NameGlobs(atomic_dirs),
            scratch=PathGlobs(scratch),
            interval_s=interval_s,
            intervals=tuple((PathGlobs([glob]), seconds) for glob, seconds in (intervals or {}).items()),
        )

    def is_atomic(self, name: bytes) -> bool:
        """Tell whether a file of this name must never be restored half written."""
        return self.atomic.matches(name)

    def is_atomic_dir(self, name: bytes) -> bool:
        """Tell whether a directory of this name is complete only as a whole."""
        return self.atomic_dirs.matches(name)

    def is_scratch(self, path: bytes) -> bool:
        """Tell whether *path*, or a directory above it, is kept locally and never published."""
        return self.scratch.covers(path)

    def interval_for(self, path: bytes) -> float:
        """Return within how many seconds a change at *path* asks for a cut: the shortest of all globs that cover it."""
        if not self.intervals:
            return self.interval_s
        return min((seconds for globs, seconds in self.intervals if globs.covers(path)), default=self.interval_s)
