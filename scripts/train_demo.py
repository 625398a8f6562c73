"""Train a small character model on data/corpus.txt, saving and resuming as ordinary training scripts do.

It knows one directory and nothing else: checkpoints are written in place into checkpoint-N/, the marker last, the
oldest removed by rmtree; the log stays open for the whole run. Invariant: the same directory and arguments give the
same weights bit by bit, however often the run is killed and resumed from the newest checkpoint *by name*.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

# Sums depend on their order: one thread gives one order. NumPy reads these once, when it is imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

CONTEXT, EMBEDDING, HIDDEN, SYMBOLS, BATCH = 16, 24, 1024, 128, 48
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
SHAPES = {
    "embedding": (SYMBOLS, EMBEDDING),
    "hidden1": (CONTEXT * EMBEDDING, HIDDEN),
    "bias1": (HIDDEN,),
    "hidden2": (HIDDEN, HIDDEN),
    "bias2": (HIDDEN,),
    "output": (HIDDEN, SYMBOLS),
    "bias3": (SYMBOLS,),
}

Arrays = dict[str, np.ndarray]


class Trainer:
    """The whole state of a run: weights, Adam's moments, the step and the random generator."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.weights: Arrays = {
            name: self.random.standard_normal(shape, dtype=np.float32) * np.float32(1 / np.sqrt(shape[0]))
            for name, shape in SHAPES.items()
        }
        self.first: Arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.second: Arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.step = 0

    def train_step(self, text: np.ndarray) -> float:
        """Take one step on a random batch and return its loss."""
        at = self.random.integers(0, len(text) - CONTEXT - 1, BATCH)
        inputs, targets = text[at[:, None] + np.arange(CONTEXT)], text[at + CONTEXT]
        loss, gradients = self._gradients(inputs, targets)
        self.step += 1
        scale = np.float32(RATE * np.sqrt(1 - BETA2**self.step) / (1 - BETA1**self.step))
        for name, gradient in gradients.items():
            first, second = self.first[name], self.second[name]
            first += np.float32(1 - BETA1) * (gradient - first)
            second += np.float32(1 - BETA2) * (gradient * gradient - second)
            self.weights[name] -= scale * first / (np.sqrt(second) + np.float32(EPSILON))
        return loss

    def _gradients(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        w = self.weights
        embedded = w["embedding"][inputs].reshape(BATCH, -1)
        layer1 = np.maximum(embedded @ w["hidden1"] + w["bias1"], 0)
        layer2 = np.maximum(layer1 @ w["hidden2"] + w["bias2"], 0)
        scores = layer2 @ w["output"] + w["bias3"]
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(BATCH)
        loss = float(-np.log(chances[rows, targets]).mean())

        chances[rows, targets] -= 1
        back3 = chances / np.float32(BATCH)
        back2 = (back3 @ w["output"].T) * (layer2 > 0)
        back1 = (back2 @ w["hidden2"].T) * (layer1 > 0)
        embedding = np.zeros_like(w["embedding"])
        np.add.at(embedding, inputs, (back1 @ w["hidden1"].T).reshape(BATCH, CONTEXT, EMBEDDING))
        return loss, {
            "embedding": embedding,
            "hidden1": embedded.T @ back1,
            "bias1": back1.sum(axis=0),
            "hidden2": layer1.T @ back2,
            "bias2": back2.sum(axis=0),
            "output": layer2.T @ back3,
            "bias3": back3.sum(axis=0),
        }

    def save(self, directory: Path) -> None:
        """Write the files one after another and in place; trainer_state.json, the marker, comes last."""
        directory.mkdir()
        np.savez(directory / "model.npz", **self.weights)
        np.savez(directory / "optimizer_first.npz", **self.first)
        np.savez(directory / "optimizer_second.npz", **self.second)
        (directory / "rng.json").write_text(json.dumps(self.random.bit_generator.state))
        (directory / "trainer_state.json").write_text(json.dumps({"step": self.step}))

    def load(self, directory: Path) -> None:
        """Read what `save` wrote; a missing or short file is an error, never a reason to look elsewhere."""
        self.step = json.loads((directory / "trainer_state.json").read_text())["step"]
        self.random.bit_generator.state = json.loads((directory / "rng.json").read_text())
        for name, arrays in (
            ("model", self.weights),
            ("optimizer_first", self.first),
            ("optimizer_second", self.second),
        ):
            with np.load(directory / f"{name}.npz") as stored:
                for key in SHAPES:
                    arrays[key][...] = stored[key]


def saved_steps(directory: Path) -> list[int]:
    names = (re.fullmatch(r"checkpoint-(\d+)", entry.name) for entry in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def say(line: str) -> None:
    print(line, flush=True)


def run(directory: Path, *, steps: int, save_every: int, keep: int, seed: int) -> None:
    trainer = Trainer(seed)
    found = saved_steps(directory)
    if found:
        trainer.load(directory / f"checkpoint-{found[-1]}")
        say(f"resumed {trainer.step}")
    text = np.minimum(np.fromfile(directory / "data" / "corpus.txt", np.uint8), SYMBOLS - 1)
    with (directory / "train.log").open("a") as log:
        while trainer.step < steps:
            loss = trainer.train_step(text)
            log.write(f"step={trainer.step} loss={loss:.6f}\n")
            log.flush()
            say(f"step {trainer.step} {loss:.4f}")
            if trainer.step % save_every == 0 or trainer.step == steps:
                began = time.monotonic()
                say(f"saving {trainer.step}")
                trainer.save(directory / f"checkpoint-{trainer.step}")
                for old in saved_steps(directory)[:-keep]:
                    shutil.rmtree(directory / f"checkpoint-{old}")
                say(f"saved {trainer.step} {time.monotonic() - began:.3f}")
    digest = hashlib.sha256(b"".join(trainer.weights[name].tobytes() for name in SHAPES)).hexdigest()
    say(f"done {trainer.step} {digest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="the run's directory, with data/corpus.txt in it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints stay")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    run(options.dir, steps=options.steps, save_every=options.save_every, keep=options.keep, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
