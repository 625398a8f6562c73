"""The tree that the bench of the plain directory works on, and the job that opens a small part of it.

Invariant: what is in a file depends on nothing but chance, so that no system gains by compressing or by knowing it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
PIECE = 4 << 20
CODE_BYTES = 4096
CHECKPOINT_PARTS = ("model-1.safetensors", "model-2.safetensors", "optimizer.pt", "scheduler.pt")
PARTS_OPENED = 4


@dataclass(frozen=True)
class Scale:
    """How much there is."""

    tree_bytes: int
    checkpoint_bytes: int
    opened_bytes: int
    code_files: int

    @classmethod
    def divided(cls, divisor: int) -> "Scale":
        """20 GB with a checkpoint of 2 GB, of which a job opens 200 MB; or a part of that."""
        return cls(20_000 * MB // divisor, 2_000 * MB // divisor, 200 * MB // divisor, 2_000 // divisor)


def make_tree(root: Path, scale: Scale) -> None:
    """Write code, a data set and one checkpoint."""
    for number in range(scale.code_files):
        _write(root / "code" / f"package{number % 20}" / f"module{number}.py", CODE_BYTES)
    part_bytes = scale.opened_bytes // PARTS_OPENED
    for number in range((scale.tree_bytes - scale.checkpoint_bytes) // part_bytes):
        _write(root / "data" / f"part-{number:05d}.bin", part_bytes)
    add_checkpoint(root, 1, scale)


def add_checkpoint(root: Path, number: int, scale: Scale) -> Path:
    """Write one more checkpoint in place, the marker last, as Hugging Face's Trainer does."""
    place = root / f"checkpoint-{number}"
    for name in CHECKPOINT_PARTS:
        _write(place / name, scale.checkpoint_bytes // len(CHECKPOINT_PARTS))
    (place / "trainer_state.json").write_text(f'{{"step": {number}}}')
    return place


def _write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for at in range(0, size, PIECE):
            file.write(os.urandom(min(PIECE, size - at)))


def opened(root: Path) -> list[Path]:
    """What the job opens: its code, and parts from all over the data set."""
    parts = sorted((root / "data").iterdir())
    step = max(1, len(parts) // PARTS_OPENED)
    return [*sorted((root / "code").rglob("*.py")), *parts[step - 1 :: step][:PARTS_OPENED]]


def read_whole(path: Path) -> int:
    """Read a file as a job does; returns how long it is."""
    count = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            count += len(piece)
    return count


def first_byte(path: Path) -> bytes:
    """Return once the first byte of a file is here."""
    with path.open("rb", buffering=0) as file:
        return file.read(1)
