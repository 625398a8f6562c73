"""A training program that saves as people do, in the way that `--saver` names; it knows one directory and nothing else.

    renamed      one file per checkpoint, under a temporary name first (`torch.save`, `os.replace`)
    in-place     one file per checkpoint, written where it is to be
    overwritten  always the same file, written over in place
    sharded      a directory per checkpoint: each process writes its shard, the metadata is renamed into place last

Invariants: it resumes from the newest *name*, and what it cannot load there is an error, never a reason to look at an
older one; the same directory and arguments give the same files bit by bit, however often it is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from train_demo import SHAPES, SYMBOLS, Trainer, np, say  # its NumPy: imported with the right number of threads

KEEP = 2
RANKS = ("weights", "first", "second")
"""What each process of a sharded writer saves."""

Arrays = Mapping[str, Any]


def write_npz(path: Path, arrays: Arrays, about: str) -> None:
    """A zip file without compression, as `torch.save` makes one."""
    with path.open("wb") as file:
        np.savez(file, about=np.frombuffer(about.encode(), np.uint8), **arrays)


def read_npz(path: Path) -> tuple[Arrays, str]:
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    return arrays, arrays["about"].tobytes().decode()


def write_torch(path: Path, arrays: Arrays, about: str) -> None:
    import torch

    torch.save({"about": about, "arrays": {name: torch.from_numpy(each) for name, each in arrays.items()}}, path)


def read_torch(path: Path) -> tuple[Arrays, str]:
    import torch

    found = torch.load(path, weights_only=True)
    return {name: each.numpy() for name, each in found["arrays"].items()}, found["about"]


FORMATS = {"npz": (write_npz, read_npz), "torch": (write_torch, read_torch)}
SUFFIXES = {"npz": "npz", "torch": "pt"}


class Saver(ABC):
    """Saves and loads the whole state of a run."""

    def __init__(self, directory: Path, form: str) -> None:
        self.directory = directory
        self.suffix = SUFFIXES[form]
        self.write, self.read = FORMATS[form]

    @abstractmethod
    def save(self, trainer: Trainer) -> None: ...

    @abstractmethod
    def load(self, trainer: Trainer) -> None:
        """Load the newest name, if there is any."""

    def saved(self, pattern: str) -> list[Path]:
        """What there is, the newest last."""
        names = (re.fullmatch(pattern, path.name) for path in self.directory.iterdir())
        return [self.directory / each[0] for each in sorted(filter(None, names), key=lambda each: int(each[1]))]

    def write_whole(self, path: Path, trainer: Trainer) -> None:
        arrays = {f"{kind}.{name}": array for kind in RANKS for name, array in getattr(trainer, kind).items()}
        self.write(path, arrays, about(trainer))

    def read_whole(self, path: Path, trainer: Trainer) -> None:
        arrays, text = self.read(path)
        for kind in RANKS:
            for name, array in getattr(trainer, kind).items():
                array[...] = arrays[f"{kind}.{name}"]
        take(trainer, text)


class InPlace(Saver):
    def save(self, trainer: Trainer) -> None:
        self.write_whole(self.directory / f"step{trainer.step:06d}.{self.suffix}", trainer)
        for path in self.saved(rf"step(\d+)\.{self.suffix}")[:-KEEP]:
            path.unlink()

    def load(self, trainer: Trainer) -> None:
        for path in self.saved(rf"step(\d+)\.{self.suffix}")[-1:]:
            self.read_whole(path, trainer)


class Renamed(InPlace):
    def write_whole(self, path: Path, trainer: Trainer) -> None:
        temporary = path.with_suffix(".tmp")
        super().write_whole(temporary, trainer)
        os.replace(temporary, path)


class Overwritten(Saver):
    def save(self, trainer: Trainer) -> None:
        self.write_whole(self.directory / f"last.{self.suffix}", trainer)

    def load(self, trainer: Trainer) -> None:
        path = self.directory / f"last.{self.suffix}"
        if path.exists():
            self.read_whole(path, trainer)


class Sharded(Saver):
    def save(self, trainer: Trainer) -> None:
        place = self.directory / f"checkpoint-{trainer.step}"
        place.mkdir()
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=self._shard, args=(place, trainer, rank)) for rank in range(len(RANKS))]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        sums = {path.name: digest(path) for path in sorted(place.iterdir())}
        temporary = place / ".metadata.tmp"
        temporary.write_text(json.dumps({"about": about(trainer), "shards": sums}))
        os.replace(temporary, place / ".metadata")
        for path in self.saved(r"checkpoint-(\d+)")[:-KEEP]:
            shutil.rmtree(path)

    def _shard(self, place: Path, trainer: Trainer, rank: int) -> None:
        with (place / f"__{rank}_0.distcp").open("wb") as file:
            for array in getattr(trainer, RANKS[rank]).values():
                np.save(file, array)

    def load(self, trainer: Trainer) -> None:
        for place in self.saved(r"checkpoint-(\d+)")[-1:]:
            found = json.loads((place / ".metadata").read_text())
            assert found["shards"] == {name: digest(place / name) for name in found["shards"]}, f"{place} is torn"
            for rank, kind in enumerate(RANKS):
                with (place / f"__{rank}_0.distcp").open("rb") as file:
                    for array in getattr(trainer, kind).values():
                        array[...] = np.load(file)
            take(trainer, found["about"])


SAVERS: dict[str, type[Saver]] = {
    "renamed": Renamed, "in-place": InPlace, "overwritten": Overwritten, "sharded": Sharded,
}  # fmt: skip


def about(trainer: Trainer) -> str:
    """Everything that is no array."""
    return json.dumps({"step": trainer.step, "random": trainer.random.bit_generator.state})


def take(trainer: Trainer, text: str) -> None:
    found = json.loads(text)
    trainer.step = found["step"]
    trainer.random.bit_generator.state = found["random"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--saver", choices=SAVERS, required=True)
    parser.add_argument("--format", choices=FORMATS, default="npz")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    saves = options.dir / "saves"
    saves.mkdir(exist_ok=True)
    saver = SAVERS[options.saver](saves, options.format)
    trainer = Trainer(seed=7)
    saver.load(trainer)
    say(f"resumed {trainer.step}")
    text = np.minimum(np.fromfile(options.dir / "data" / "corpus.txt", np.uint8), SYMBOLS - 1)
    while trainer.step < options.steps:
        loss = trainer.train_step(text)
        say(f"step {trainer.step} {loss:.4f}")
        if trainer.step % options.save_every == 0:
            saver.save(trainer)
            say(f"saved {trainer.step}")
    weights = hashlib.sha256(b"".join(trainer.weights[name].tobytes() for name in SHAPES)).hexdigest()
    say(f"done {trainer.step} {weights}")


if __name__ == "__main__":
    main()
