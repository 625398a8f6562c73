"""Tell what looks like a secret, by its name and by its value, and take it out of texts that are kept.

Invariant: a doubt counts as a secret; hiding too much costs a line in a record, showing one costs an account (P-15).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

MASK: Final = "<secret>"
RUN_CHARS_MIN: Final = 16
ENTROPY_BITS_MIN: Final = 3.0
CHANGES_MIN: Final = 0.25
"""Share of neighbours of different kinds (digit, small, capital): words and dates have few, random text has many."""
CHANGES_LETTERS_MIN: Final = 0.45
"""The same where no digit is among them: names such as MyDatasetLoader stay below it."""
CHANGES_BASE64_MIN: Final = 0.38
"""The same for what may be base64 with slashes in it, which a path also is."""
KNOWN_CHARS_MIN: Final = 6
"""A secret of the environment is looked for in other texts only if it is this long: short ones are words."""

_NAMES: Final = frozenset(
    {
        "key", "keys", "token", "secret", "secrets", "pass", "passwd", "password", "passphrase", "pwd", "pw",
        "credential", "credentials", "cred", "creds", "auth", "authorization", "cookie", "cookies", "session",
        "private", "signature", "dsn", "apikey", "accesskey", "pat", "jwt", "bearer", "netrc", "sas",
    }
)  # fmt: skip
_ENDINGS: Final = ("apikey", "accesskey", "secretkey", "privatekey", "token", "secret", "password", "passwd")
_PLAIN: Final = frozenset({"pwd", "oldpwd"})
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PREFIXED: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|sk_|rk_|xox[abeprs]-|AKIA|ASIA|AIza|ya29\.|eyJ|dop_v1_|npm_"
    r"|pypi-|SG\.)[A-Za-z0-9_\-.]{8,}"
)
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/@]+(?=@)")
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_RUN: Final = re.compile(rf"[A-Za-z0-9]{{{RUN_CHARS_MIN},}}")
_BASE64: Final = re.compile(r"(?<![A-Za-z0-9_.\-/])[A-Za-z0-9+][A-Za-z0-9+/]{31,}={0,2}(?![A-Za-z0-9_.\-])")
_LONG: Final = re.compile(r"[A-Za-z0-9+/_=\-.]+")
_QUOTED: Final = re.compile(r"""([A-Za-z0-9_.\-]+)(["']?\s*[:=]\s*["'])([^"'\n]+)(?=["'])""")
_BARE: Final = re.compile(r"((?:^|[\s;&(+\-]))([A-Z][A-Z0-9_]*)=(?!=)(\S+)", re.MULTILINE)
_OPTION: Final = re.compile(r"-{0,2}[A-Za-z0-9_.\-]+")


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or option of this name holds a secret.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("--api-key"), is_secret_name("max_new_tokens"), is_secret_name("PWD")
    (True, True, False, False)
    """
    if name.lower() in _PLAIN:
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    return any(word in _NAMES or word.endswith(_ENDINGS) for word in words)


def is_secret_value(value: str) -> bool:
    """Tell whether *value* holds something that only a key, a token or a password looks like.

    >>> is_secret_value("q8Zr1vT4kPx93LmWb7Yc"), is_secret_value("meta-llama/Meta-Llama-3.1-8B-Instruct")
    (True, False)
    """
    if _PREFIXED.search(value) or _CREDENTIALS.search(value) or _PEM.search(value):
        return True
    return _has_random(value)


def _has_random(text: str) -> bool:
    if any(_is_random(run[0]) for run in _RUN.finditer(text)):
        return True
    return any(_changes(run[0])[1] >= CHANGES_BASE64_MIN for run in _BASE64.finditer(text))


def _is_random(run: str) -> bool:
    kinds, changes = _changes(run)
    wanted = CHANGES_MIN if 0 in kinds else CHANGES_LETTERS_MIN
    counts = Counter(run).values()
    entropy = -sum(count / len(run) * math.log2(count / len(run)) for count in counts)
    return len(kinds) > 1 and changes >= wanted and entropy >= ENTROPY_BITS_MIN


def _changes(run: str) -> tuple[set[int], float]:
    """The kinds of characters in *run*, and how often the next one is of another kind."""
    kinds = [0 if char.isdigit() else 1 if char.islower() else 2 if char.isupper() else 3 for char in run]
    return set(kinds), sum(one != other for one, other in pairwise(kinds)) / len(run)


def masked_text(text: str, known: Iterable[str] = ()) -> str:
    """Return *text* with what looks like a secret replaced, and with the *known* ones replaced wherever they stand."""
    for secret in sorted({one for one in known if len(one) >= KNOWN_CHARS_MIN}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _PEM.sub(MASK, text)
    text = _CREDENTIALS.sub(MASK, text)
    text = _PREFIXED.sub(MASK, text)
    text = _QUOTED.sub(lambda hit: hit[1] + hit[2] + (MASK if is_secret_name(hit[1]) else hit[3]), text)
    text = _BARE.sub(lambda hit: f"{hit[1]}{hit[2]}={MASK if is_secret_name(hit[2]) else hit[3]}", text)
    return _LONG.sub(lambda hit: MASK if _has_random(hit[0]) else hit[0], text)


def masked_command(command: Iterable[str], known: Iterable[str] = ()) -> tuple[str, ...]:
    """Return a command line without secrets: values of options with such names, and what looks like one.

    >>> masked_command(["train", "--api-key", "abc", "--lr=3e-4", "--token=x"])
    ('train', '--api-key', '<secret>', '--lr=3e-4', '--token=<secret>')
    """
    secrets = tuple(known)
    kept: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            kept.append(MASK)
        elif equals and _OPTION.fullmatch(name) and is_secret_name(name):
            kept.append(f"{name}={MASK}")
        else:
            kept.append(masked_text(word, secrets))
        hide_next = word.startswith("-") and not equals and is_secret_name(word)
    return tuple(kept)


def split_environment(environment: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what may be kept of an environment, and the names of what may not, sorted."""
    hidden = {name for name, value in environment.items() if is_secret_name(name) or is_secret_value(value)}
    shown = {name: environment[name] for name in sorted(environment.keys() - hidden)}
    return shown, tuple(sorted(hidden))
