"""Train a small classifier on frames that are streamed from two files side by side, with numpy alone.

Features and targets lie in a file each. A mapping of names to files streams them together: every batch has
``batch.frames["mel"]`` and ``batch.frames["target"]``, row by row of the same frames.

python examples/train_async.py
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from asyncfeed import Feed

NUM_CLASSES, NUM_FEATURES, NUM_HIDDEN = 5, 40, 32
EPOCHS, BATCH, RATE = 5, 128, 0.02


def write_corpus(folder: Path) -> dict[str, Path]:
    """A hundred utterances; every frame is noise around the centre of its class."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(NUM_CLASSES, NUM_FEATURES))
    paths = {"mel": folder / "mel.h5", "target": folder / "target.h5"}
    with h5py.File(paths["mel"], "w") as mel, h5py.File(paths["target"], "w") as target:
        for number in range(100):
            classes = rng.integers(NUM_CLASSES, size=rng.integers(100, 300))
            noise = rng.normal(size=(classes.size, NUM_FEATURES))
            mel[f"utt{number:03d}"] = (centres[classes] + 1.5 * noise).astype("float32")
            target[f"utt{number:03d}"] = classes.astype("int64")
    return paths


class Classifier:
    """Two layers and a softmax, trained by gradient descent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.inner = rng.normal(scale=0.1, size=(NUM_FEATURES, NUM_HIDDEN))
        self.outer = rng.normal(scale=0.1, size=(NUM_HIDDEN, NUM_CLASSES))

    def step(self, mel: np.ndarray, target: np.ndarray) -> float:
        """One step of training; the mean cross-entropy before it."""
        hidden = np.maximum(mel @ self.inner, 0)
        scores = hidden @ self.outer
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        rows = np.arange(target.size)
        loss = -float(np.log(shares[rows, target] + 1e-12).mean())
        error = shares
        error[rows, target] -= 1
        error /= target.size
        back = (error @ self.outer.T) * (hidden > 0)
        self.outer -= RATE * (hidden.T @ error)
        self.inner -= RATE * (mel.T @ back)
        return loss


async def train_epoch(feed: Feed, model: Classifier) -> float:
    """One epoch; the mean loss."""
    total, batches = 0.0, feed.batches(BATCH, drop_last=True)
    num_batches = len(batches)
    async for batch in batches:
        total += model.step(batch.frames["mel"], batch.frames["target"])
    return total / num_batches


async def train(paths: dict[str, Path]) -> list[float]:
    """The mean loss of every epoch."""
    model, losses = Classifier(), []
    async with Feed(paths, seed=7, index="off") as feed:  # these files will not be opened a second time
        for epoch in range(EPOCHS):
            losses.append(await train_epoch(feed, model))
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
        print(f"verdict: {feed.statistics().verdict}")
    return losses


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = await train(write_corpus(Path(folder)))
    if not losses[-1] < losses[0] / 2:
        sys.exit(f"the loss did not fall: {losses}")
    print(f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    asyncio.run(main())
