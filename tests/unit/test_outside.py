"""Is it noticed, once and with the right advice, that a command writes where nothing is saved?"""

from __future__ import annotations

from pathlib import Path

from spotwarp_fs.cli.running.outside import OUTSIDE_BYTES_MAX, Outside
from spotwarp_fs.local.processes import OpenFile

MUCH = OUTSIDE_BYTES_MAX + 1


def watching(tmp_path: Path, *command: str) -> Outside:
    for name in ("workspace", "state", "here"):
        (tmp_path / name).mkdir()
    return Outside(tmp_path / "workspace", [tmp_path / "state"], command or ("train",), tmp_path / "here")


def opened(path: Path, size: int, *, position: int = 0, appends: bool = False) -> OpenFile:
    return OpenFile(str(path), (1, hash(path)), size, position, appends)


def test_what_is_written_inside_is_no_matter(tmp_path: Path) -> None:
    outside = watching(tmp_path)
    for place in ("workspace", "state"):
        assert outside.look([opened(tmp_path / place / "f", MUCH, position=MUCH)], {}) == []


def test_a_place_is_named_once(tmp_path: Path) -> None:
    outside = watching(tmp_path)
    first = outside.look([opened(tmp_path / "out" / "checkpoint-1" / "model", MUCH, position=MUCH)], {})
    assert len(first) == 1
    assert f"to {tmp_path}/out, outside" in first[0]
    assert outside.look([opened(tmp_path / "out" / "checkpoint-2" / "model", MUCH, position=MUCH)], {}) == []


def test_only_what_was_written_counts(tmp_path: Path) -> None:
    """A big log that is appended to, and a big file that was there before, are not what this command wrote."""
    outside = watching(tmp_path)
    log, data = tmp_path / "log", tmp_path / "data"
    for grown in (0, 1000):
        files = [opened(log, MUCH + grown, position=MUCH + grown, appends=True), opened(data, MUCH)]
        assert outside.look(files, {}) == []
    assert len(outside.look([opened(log, 2 * MUCH + 1000, position=2 * MUCH, appends=True)], {})) == 1


def test_small_files_add_up(tmp_path: Path) -> None:
    outside = watching(tmp_path)
    part = OUTSIDE_BYTES_MAX // 4
    found = [
        warning
        for number in range(5)
        for warning in outside.look([opened(tmp_path / "out" / f"shard-{number}", part, position=part)], {})
    ]
    assert len(found) == 1


def test_a_file_that_nobody_saw_open_is_found_by_the_bytes(tmp_path: Path) -> None:
    outside = watching(tmp_path)
    (tmp_path / "here" / "out").mkdir()
    with (tmp_path / "here" / "out" / "model").open("wb") as file:
        file.truncate(MUCH)
    assert outside.look([], {7: 1000}) == []
    assert len(outside.look([], {7: MUCH + 1000})) == 1


def test_the_argument_to_change_is_named(tmp_path: Path) -> None:
    outside = watching(tmp_path, "train.py", "--output_dir", "out", "--data=in")
    [warning] = outside.look([opened(tmp_path / "here" / "out" / "step-1" / "model", MUCH, position=MUCH)], {})
    assert "Change `--output_dir out` to `--output_dir $SPOTWARP_CHECKPOINT_DIR`" in warning
    assert "Change `--output_dir out`" in outside.nothing_inside()


def test_without_such_an_argument_there_is_an_example(tmp_path: Path) -> None:
    outside = watching(tmp_path, "train.py")
    assert "--output_dir $SPOTWARP_CHECKPOINT_DIR" in outside.nothing_inside()
