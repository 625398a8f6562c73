from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.cli import config_view, derived, sources
from spotwarp_fs.cli.settings import KEYS, LIST_KEYS, MAP_KEYS, SECRET_KEYS, Settings, variable
from spotwarp_fs.cli.sources import LoadedSettings, load_settings
from spotwarp_fs.core.errors import ExitCode, UserError

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("SPOTWARP_"):
            monkeypatch.delenv(name)
    (tmp_path / ".spotwarp").mkdir()
    return tmp_path


def write_config(home: Path, text: str, mode: int = 0o600) -> Path:
    path = home / ".spotwarp" / "config.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def refusal(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        load_settings(flags, environ or {})
    return caught.value


def test_flags_beat_variables_beat_the_file_beats_defaults(home: Path) -> None:
    path = write_config(home, "interval: 10s\ngrace: 7m\nmount:\n  atime: relatime\nfsync: remote\n")
    loaded = load_settings({"interval": "2s"}, {"SPOTWARP_INTERVAL": "5s", "SPOTWARP_GRACE": "8m"})
    assert loaded.settings.interval == 2
    assert loaded.settings.grace == 480
    assert loaded.settings.fsync == "remote"
    assert loaded.settings.mount.atime == "relatime"
    assert loaded.settings.write_wait_max == 300
    places = [loaded.source(key).place for key in ("interval", "grace", "fsync", "mount.atime", "write_wait_max")]
    assert places == ["--interval", "SPOTWARP_GRACE", f"{path}:5", f"{path}:4", "default"]


@given(st.lists(st.sampled_from(["file", "environment", "flag"]), unique=True))
def test_the_strongest_source_that_sets_a_key_wins(kinds: list[str]) -> None:
    order = ["file", "environment", "flag"]
    values = {kind: sources.Given(str(index + 2), sources.Source(kind)) for index, kind in enumerate(order)}  # type: ignore[arg-type]
    merged: dict[str, sources.Given] = {}
    for kind in order:
        if kind in kinds:
            merged.update({"upload_threads": values[kind]})
    strongest = max((order.index(kind) for kind in kinds), default=None)
    assert sources.validated(merged).upload_threads == (8 if strongest is None else strongest + 2)


def test_no_configuration_at_all_is_usable(home: Path) -> None:
    loaded = load_settings({}, {})
    assert loaded.settings.store_url() == f"file://{home}/.spotwarp/store"
    assert derived.cache_directory(loaded.settings, "w") == home / ".spotwarp" / "cache" / "w"
    assert not loaded.config_found


def test_the_state_directory_moves_what_hangs_on_it(home: Path) -> None:
    state = home / "state"
    state.mkdir()
    (state / "config.yaml").write_text("interval: 3s\n")
    loaded = load_settings({}, {"SPOTWARP_STATE_DIR": str(state)})
    assert loaded.settings.interval == 3
    assert loaded.settings.store_url() == f"file://{state}/store"


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("intervall: 5s", 1, "did you mean interval?"),
        ("# note\ncache-size: 5G", 2, "did you mean cache_size?"),
        ("s3:\n  endpiont: http://x", 2, "did you mean s3.endpoint?"),
        ("endpoint: http://x", 1, "did you mean "),
        ("mount:\n  zzzzqq: 1", 2, "mount.zzzzqq is no setting."),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(
    home: Path, text: str, line: int, named: str
) -> None:
    path = write_config(home, text)
    error = refusal()
    assert str(error).startswith(f"{path}:{line}: ")
    assert named in str(error)
    assert error.exit_code is ExitCode.CONFIG


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    assert "did you mean SPOTWARP_STORE?" in str(refusal(environ={"SPOTWARP_STOR": "s3://b"}))
    load_settings({}, {"SPOTWARP_SEED": "5", "SPOTWARP_TEST_X": "y", "SPOTWARP_INTERVAL": ""})


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("interval", "0.5s", "the least is 1s"),
        ("interval", "soon", "'soon' is not a duration"),
        ("cache_size", "20X", "'20X' is not a size"),
        ("cache_size", "1M", "the least is 64M"),
        ("grace", "31m", "the most is 30m"),
        ("fsync", "both", "is not among 'local', 'remote'"),
        ("mount.xattrs", "perhaps", "neither true nor false"),
        ("upload_threads", "1.5", "not a whole number"),
        ("store", "/data", "did you mean file:///data?"),
        ("store", "s3:///x", "is not a store"),
        ("store", "file://data/x", "is not a store"),
        ("workspace", "Bad Name", "cannot name a workspace"),
        ("cache_dir", "here", "not an absolute path"),
        ("atomic", "a/*.pt", "has a slash"),
        ("intervals", "{logs: 5x}", "'5x' is not a duration"),
        ("intervals", "{logs: 100ms}", "at least 1s"),
        ("s3.endpoint", "localhost:8333", "is not an endpoint"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_is_right(home: Path, key: str, text: str, says: str) -> None:
    by_variable = str(refusal(environ={variable(key): text}))
    assert says in by_variable
    assert by_variable.startswith(variable(key))
    if key not in SECRET_KEYS | MAP_KEYS | LIST_KEYS:
        path = write_config(home, f"{key}: '{text}'")
        by_file = str(refusal())
        assert by_file.startswith(f"{path}:1: {key}: ")
        assert says in by_file


def test_a_wrong_flag_is_a_usage_error_and_a_wrong_file_a_configuration_error() -> None:
    assert refusal({"interval": "x"}).exit_code is ExitCode.USAGE
    assert refusal({"interval": "x"}, {"SPOTWARP_GRACE": "y"}).exit_code is ExitCode.CONFIG


@pytest.mark.parametrize(
    "text",
    ["a: [", "- a\n- b", "just text", "interval: 5s\ninterval: 6s", "s3: 5", "interval: [5s]", "atomic: '*.a'", "1: 2"],
)
def test_a_file_that_is_no_configuration_is_refused_by_line(home: Path, text: str) -> None:
    path = write_config(home, text)
    assert re.match(rf"{re.escape(str(path))}:\d+: ", str(refusal()))


def test_scalars_are_read_as_written_not_as_yaml_numbers(home: Path) -> None:
    write_config(home, "workspace: 0644\ncache_size: 1073741824\ns3:\nretention: ~\nstore:\n")
    settings = load_settings({}, {}).settings
    assert settings.workspace == "0644"
    assert settings.cache_size == 1 << 30
    assert settings.store is None


def test_lists_and_pairs_are_read_from_one_line() -> None:
    environ = {"SPOTWARP_ATOMIC": "*.a, *.b", "SPOTWARP_SCRATCH": "[]", "SPOTWARP_INTERVALS": "{'*.log': 5s}"}
    settings = load_settings({}, environ).settings
    assert settings.atomic == ("*.a", "*.b")
    assert settings.scratch == ()
    assert settings.policies().interval_for(b"x/y.log") == 5
    assert settings.policies().is_atomic(b"q.b")


def test_secrets_are_in_no_rendering(home: Path) -> None:
    write_config(home, "".join(f"{key}: {SECRET}\n" for key in sorted(SECRET_KEYS)))
    loaded = load_settings({}, {})
    shown = [
        repr(loaded),
        str(loaded.settings),
        json.dumps(config_view.document(loaded)),
        *map(repr, config_view.lines(loaded)),
    ]
    shown += [loaded.settings.model_dump_json(), repr(sources.read_file(loaded.config_path))]
    assert all(SECRET not in text for text in shown)
    assert loaded.settings.s3.access_key_id is not None
    assert loaded.settings.s3.access_key_id.get_secret_value() == SECRET
    assert len(SECRET_KEYS) == 5


@pytest.mark.parametrize(
    "text",
    [
        f"s3:\n  secret_access_key: [{SECRET}]",
        f"s3:\n  secret_access_key: {{{SECRET}: 1}}",
        f"s3:\n  secret_access_key: '{SECRET}\n bad: [",
        f"s3:\n  secret_access_key: {SECRET}\ninterval: x",
        f"store: s3://key:{SECRET}@bucket",
        f"s3:\n  endpoint: http://key:{SECRET}@host",
    ],
)
def test_secrets_are_in_no_error(home: Path, text: str) -> None:
    write_config(home, text)
    error = refusal()
    assert SECRET not in str(error)
    assert SECRET not in repr(error.__cause__)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_with_secrets_that_others_can_reach_is_refused(home: Path, mode: int) -> None:
    write_config(home, f"s3.access_key_id: {SECRET}", mode)
    error = refusal()
    assert "chmod 600" in str(error)
    assert SECRET not in str(error)
    write_config(home, "interval: 5s", mode)
    assert load_settings({}, {}).settings.interval == 5


def test_a_named_file_that_is_missing_is_refused(home: Path) -> None:
    assert "cannot be read" in str(refusal(environ={"SPOTWARP_CONFIG": str(home / "none.yaml")}))


def test_the_template_sets_nothing_and_uncommented_sets_the_defaults(home: Path) -> None:
    text = config_view.template()
    write_config(home, text)
    assert load_settings({}, {}).given == {}
    write_config(home, re.sub(r"(?m)^#([a-z])", r"\1", text))
    loaded = load_settings({}, {})
    assert loaded.settings == Settings()
    assert set(loaded.given) == {key for key, value in config_view.values(Settings()).items() if value is not None}


def test_every_setting_is_described_and_documented() -> None:
    assert all(info.description for info in KEYS.values())
    assert config_view.markdown() in OPERATIONS.read_text()
    documented = set(re.findall(r"(?m)^\| (\d+) \| `([A-Z_]+)`", OPERATIONS.read_text()))
    assert documented == {(str(code.value), code.name) for code in ExitCode}


@given(st.text(max_size=20), st.text(max_size=20))
def test_every_default_workspace_name_is_valid_and_stable(user: str, name: str) -> None:
    mountpoint = Path("/mnt") / name.replace("/", "_").replace("\0", "_")
    derived_name = derived.default_workspace(mountpoint, user)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", derived_name)
    assert derived_name == derived.default_workspace(mountpoint, user)


def test_the_cache_budget_leaves_the_reserve_and_counts_the_cache_as_free() -> None:
    gib = 1 << 30
    settings = Settings()
    assert derived.cache_budget(settings, free_bytes=100 * gib, cached_bytes=0) == 80 * gib
    assert derived.cache_budget(settings, free_bytes=20 * gib, cached_bytes=80 * gib) == 80 * gib
    assert derived.cache_budget(settings, free_bytes=2 * gib, cached_bytes=0) == int(2 * gib * 0.8)
    assert derived.cache_budget(Settings(free_reserve="30G"), free_bytes=100 * gib, cached_bytes=0) == 80 * gib  # type: ignore[arg-type]
    assert derived.cache_budget(settings, free_bytes=0, cached_bytes=58 << 20) == int((58 << 20) * 0.8)
    with pytest.raises(UserError) as caught:
        derived.cache_budget(settings, free_bytes=15 << 20, cached_bytes=0)
    assert caught.value.exit_code is ExitCode.CACHE
    assert derived.cache_budget(Settings(cache_size="3G"), free_bytes=0, cached_bytes=0) == 3 * gib  # type: ignore[arg-type]


def test_the_schema_knows_every_key_and_takes_sizes_as_text() -> None:
    schema = Settings.model_json_schema()
    assert set(schema["properties"]) == {key.partition(".")[0] for key in KEYS}
    assert schema["properties"]["interval"]["type"] == "string"
    assert schema["additionalProperties"] is False


def test_loaded_settings_are_frozen() -> None:
    loaded: LoadedSettings = load_settings({}, {})
    with pytest.raises(ValueError, match="frozen"):
        loaded.settings.interval = 5


def test_what_run_tells_its_command_is_no_setting() -> None:
    told = {"SPOTWARP_WORKSPACE": "/w", "SPOTWARP_RESUMED": "0", "SPOTWARP_RESTORED_FROM": ""}
    found = sources.read_environment({**told, "SPOTWARP_CHECKPOINT_DIR": "/w/checkpoints", "SPOTWARP_INTERVAL": "5s"})
    assert list(found) == ["interval"]
    assert list(sources.read_environment({**told, "SPOTWARP_WORKSPACE": "run7"})) == ["workspace"]
    with pytest.raises(UserError, match="SPOTWARP_WORKSPACE"):
        load_settings(environ={"SPOTWARP_WORKSPACE": "/w", "HOME": "/nowhere"})
