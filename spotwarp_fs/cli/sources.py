"""Gather settings from where people put them: defaults, then the file, then `SPOTWARP_*` variables, then flags.

Invariant: every value keeps the place it came from, a wrong one is reported with that place, and the value of a secret
is in no message.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from spotwarp_fs.cli.settings import KEYS, LIST_KEYS, MAP_KEYS, SECRET_KEYS, Settings, variable
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import exact_duration, exact_size

INSIDE_RUN: Final = "SPOTWARP_RESUMED"
"""Set for what `spotwarp run` starts."""
TOLD_BY_RUN: Final = frozenset({INSIDE_RUN, "SPOTWARP_RESTORED_FROM", "SPOTWARP_CHECKPOINT_DIR"})
OTHER_VARIABLES: Final = TOLD_BY_RUN | {"SPOTWARP_CONFIG", "SPOTWARP_NO_FUSE", "SPOTWARP_SEED", "SPOTWARP_VENV"}
"""Variables of ours that are not settings."""
OTHER_PREFIXES: Final = ("SPOTWARP_TEST_", "SPOTWARP_RUN_", "SPOTWARP_INTERNAL_")
CONFIG_BYTES_MAX: Final = 1 << 20

Raw = str | list[str] | dict[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from: the kind, and the place as a person would look it up."""

    kind: Literal["default", "file", "environment", "flag"]
    place: str = "default"


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written; it may be a secret, so it is not in the repr."""

    value: Raw = field(repr=False)
    source: Source


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings in force, and where each that is not a default was set."""

    settings: Settings
    given: Mapping[str, Source]
    config_path: Path
    config_found: bool

    def source(self, key: str) -> Source:
        """Return where the value of a dotted key came from."""
        return self.given.get(key, Source("default"))


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """Read every source, or raise UserError (exit code CONFIG) naming the place and the remedy.

    *flags* maps dotted keys to what the command line gave; None means "not given".
    """
    environment = os.environ if environ is None else environ
    path = config_path(environment)
    required = bool(environment.get("SPOTWARP_CONFIG"))
    from_file = read_file(path) if required or _is_there(path, environment) else None
    given = {**(from_file or {}), **read_environment(environment), **read_flags(flags or {})}
    return LoadedSettings(
        settings=validated(given),
        given={key: item.source for key, item in given.items()},
        config_path=path,
        config_found=from_file is not None,
    )


def _is_there(path: Path, environ: Mapping[str, str]) -> bool:
    """Say whether to read the file at the default place."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        # A container's user often has a home that is root's: nothing in there is theirs. A place that they named is.
        return bool(environ.get("SPOTWARP_STATE_DIR"))
    return True


def config_path(environ: Mapping[str, str]) -> Path:
    """Return the configuration file's path: SPOTWARP_CONFIG, or config.yaml in the state directory."""
    if named := environ.get("SPOTWARP_CONFIG"):
        return Path(named).expanduser().absolute()
    return Path(environ.get("SPOTWARP_STATE_DIR") or "~/.spotwarp").expanduser().absolute() / "config.yaml"


def read_file(path: Path) -> dict[str, Given]:
    """Read a configuration file into dotted keys.

    Raises UserError for unknown and repeated keys, and for secrets in a file that others can read.
    """
    text, mode = _read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # The library's own message quotes the file, which may hold a secret.
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise _bad(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise _bad(f"{path}: not valid YAML: it holds a character that YAML does not allow") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _bad(f"{path}:{root.start_mark.line + 1}: expected lines of the form `key: value`")
    found: dict[str, Given] = {}
    _collect(root, "", path, found)
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and (secrets := sorted(SECRET_KEYS & found.keys())):
        raise _bad(f"{path} holds {', '.join(secrets)} but its mode {mode:04o} lets others in; run: chmod 600 {path}")
    return found


def _read_text(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            body = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(f"the configuration file {path} cannot be read: {error.strerror}") from error
    if len(body) > CONFIG_BYTES_MAX:
        raise _bad(f"{path} is larger than {exact_size(CONFIG_BYTES_MAX)}; this is no configuration file")
    try:
        return body.decode("utf-8"), mode
    except UnicodeDecodeError as error:
        raise _bad(f"{path} is not UTF-8 text (byte {error.start})") from None


def _collect(mapping: yaml.MappingNode, prefix: str, path: Path, found: dict[str, Given]) -> None:
    for key_node, value_node in mapping.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise _bad(f"{place}: a key must be a word")
        key = prefix + key_node.value
        if key in KEYS:
            if key in found:
                raise _bad(f"{place}: {key} is set twice, first at {found[key].source.place}")
            value = _plain(value_node, key, place)
            if value is not None:
                found[key] = Given(value, Source("file", place))
        elif not any(known.startswith(f"{key}.") for known in KEYS):
            raise unknown_key(key, place)
        elif isinstance(value_node, yaml.MappingNode):
            _collect(value_node, f"{key}.", path, found)
        elif not _is_null(value_node):
            raise _bad(f"{place}: {key} is a group of settings; indent them below it, as in `{_example(key)}: …`")


def _is_null(node: yaml.Node) -> bool:
    return str(node.tag) == "tag:yaml.org,2002:null"


def _plain(node: yaml.Node, key: str, place: str) -> Raw | None:
    """Return text, a list of texts or a map of texts.

    Scalars stay as they were written: YAML would read `1:30` as ninety, `1_000` as a thousand and `0644` as octal.
    """
    if _is_null(node):
        return None
    scalars = (yaml.ScalarNode,)
    if isinstance(node, scalars):
        if key not in LIST_KEYS | MAP_KEYS:
            return str(node.value)
    elif isinstance(node, yaml.SequenceNode):
        if key in LIST_KEYS and all(isinstance(item, scalars) for item in node.value):
            return [str(item.value) for item in node.value]
    elif isinstance(node, yaml.MappingNode) and key in MAP_KEYS:
        pairs = list(node.value)
        if all(isinstance(name, scalars) and isinstance(value, scalars) for name, value in pairs):
            return {str(name.value): str(value.value) for name, value in pairs}
    kind = "a list of globs, as in ['*.a', '*.b']" if key in LIST_KEYS else "one value"
    raise _bad(f"{place}: {key} takes {'pairs, as in {logs: 5s}' if key in MAP_KEYS else kind}")


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Read the `SPOTWARP_*` variables; an empty one counts as not set, an unknown one is refused.

    A misspelt SPOTWARP_STORE that was passed over would send a month's work to the default directory.
    """
    by_variable = {variable(key): key for key in KEYS}
    found: dict[str, Given] = {}
    for name, text in environ.items():
        if not name.startswith("SPOTWARP_") or name in OTHER_VARIABLES or name.startswith(OTHER_PREFIXES):
            continue
        key = by_variable.get(name)
        if key is None:
            near = difflib.get_close_matches(name, [*by_variable, *OTHER_VARIABLES], n=1)
            raise _bad(f"{name}: this variable is no setting{_did_you_mean(near)} Unset it, or correct its name.")
        if key == "workspace" and INSIDE_RUN in environ and text.startswith("/"):
            # Inside `spotwarp run` it tells the command the directory; no workspace is named so.
            continue
        if text:
            found[key] = Given(_structured(key, text, name), Source("environment", name))
    return found


def read_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    """Take what the command line gave, by dotted key; secrets have no flag, since others can read a command line."""
    found: dict[str, Given] = {}
    for key, value in flags.items():
        assert key in KEYS, key
        assert key not in SECRET_KEYS, key
        if value is None:
            continue
        place = f"--{key.replace('.', '-').replace('_', '-')}"
        text = str(value)
        found[key] = Given(_structured(key, text, place), Source("flag", place))
    return found


def _structured(key: str, text: str, place: str) -> Raw:
    """Read a list or map that was written on one line: words, or YAML's own `[a, b]` and `{a: 5s}`."""
    if key not in LIST_KEYS | MAP_KEYS:
        return text
    if key in LIST_KEYS and not text.lstrip().startswith("["):
        return text.replace(",", " ").split()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    value = _plain(node, key, place) if node is not None else None
    if value is None:
        raise _bad(f"{place}: {text!r} cannot be read as {'pairs' if key in MAP_KEYS else 'a list'}")
    return value


def validated(given: Mapping[str, Given]) -> Settings:
    """Check values against the model, or raise UserError with one line per wrong one."""
    nested: dict[str, Any] = {}
    for key, item in given.items():
        *sections, name = key.split(".")
        level = nested
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = item.value
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        found: list[dict[str, Any]] = [{**problem} for problem in error.errors(include_url=False)]
        wrong = [given.get(_key_of(problem["loc"])) for problem in found]
        from_flags = all(item is not None and item.source.kind == "flag" for item in wrong)
        code = ExitCode.USAGE if from_flags else ExitCode.CONFIG
        raise UserError("\n".join(_problem(problem, given) for problem in found), code) from None


def _problem(found: dict[str, Any], given: Mapping[str, Given]) -> str:
    """Say what is wrong with one value, and where it was written."""
    key = _key_of(found["loc"])
    item = given.get(key)
    # Flags and variables are named after their key.
    place = f"{item.source.place}: " if item else ""
    named = "" if item and item.source.kind in ("flag", "environment") else f"{key}: "
    context = found.get("ctx", {})
    shown = "the value" if key in SECRET_KEYS or item is None else repr(item.value)
    match found["type"]:
        case "value_error":
            reason = str(context["error"])
        case "greater_than_equal":
            reason = f"{shown} is too small; the least is {_as_written(key, context['ge'])}"
        case "less_than_equal":
            reason = f"{shown} is too large; the most is {_as_written(key, context['le'])}"
        case "literal_error":
            reason = f"{shown} is not among {context['expected'].replace(' or ', ', ')}"
        case "bool_parsing" | "bool_type":
            reason = f"{shown} is neither true nor false"
        case "int_parsing" | "int_type" | "int_from_float":
            reason = f"{shown} is not a whole number"
        case _:
            reason = f"{shown}: {found['msg']}"
    return f"{place}{named}{reason}"


def _key_of(location: tuple[int | str, ...]) -> str:
    for length in range(len(location), 0, -1):
        if (key := ".".join(map(str, location[:length]))) in KEYS:
            return key
    return ".".join(map(str, location))


def _as_written(key: str, number: int | float) -> str:
    kind = str(KEYS[key].annotation) + str(KEYS[key].metadata)
    if "parse_size" in kind or "exact_size" in kind:
        return exact_size(int(number))
    return exact_duration(number) if "exact_duration" in kind else str(number)


def unknown_key(key: str, place: str) -> UserError:
    """Build the refusal of an unknown key, with the nearest right name."""
    wanted = key.replace("-", "_").lower()
    near = difflib.get_close_matches(wanted, KEYS, n=1, cutoff=0.6)
    if not near:
        last = {known.rpartition(".")[2]: known for known in KEYS}
        near = [last[name] for name in difflib.get_close_matches(wanted.rpartition(".")[2], last, n=1, cutoff=0.75)]
    return _bad(f"{place}: {key} is no setting{_did_you_mean(near)} `spotwarp config show` lists all.")


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]}?" if near else "."


def _example(section: str) -> str:
    return next(key for key in KEYS if key.startswith(f"{section}.")).partition(".")[2]


def _bad(message: str) -> UserError:
    return UserError(message, ExitCode.CONFIG)
