"""Train a small recurrent network of torch with a ``DataLoader`` and two workers, on the CPU.

Each worker streams half of the utterances with a feed of its own. ``batch_size=None``, as the feed makes the batches: whole
utterances of similar length, filled up to the longest. Every iteration over the loader is one epoch, each time the next.

python examples/train_dataloader.py
"""

import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from asyncfeed import Feed

try:
    import torch
except ModuleNotFoundError:
    sys.exit('this example needs torch: pip install "asyncfeed[torch]"')

from torch.utils.data import DataLoader

from asyncfeed.torch import FeedDataset

NUM_CLASSES, NUM_FEATURES, NUM_HIDDEN = 5, 40, 32
EPOCHS, MAX_FRAMES, RATE, WORKERS = 4, 1000, 0.01, 2


def write_corpus(folder: Path) -> dict[str, Path]:
    """A hundred utterances; every frame is noise around the centre of its class, which changes every ten frames."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(NUM_CLASSES, NUM_FEATURES))
    paths = {"mel": folder / "mel.h5", "target": folder / "target.h5"}
    with h5py.File(paths["mel"], "w") as mel, h5py.File(paths["target"], "w") as target:
        for number in range(100):
            classes = np.repeat(rng.integers(NUM_CLASSES, size=rng.integers(5, 20)), 10)
            noise = rng.normal(size=(classes.size, NUM_FEATURES))
            mel[f"utt{number:03d}"] = (centres[classes] + 3 * noise).astype("float32")
            target[f"utt{number:03d}"] = classes.astype("int64")
    return paths


class Tagger(torch.nn.Module):
    """Says for every frame of an utterance which class it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.GRU(NUM_FEATURES, NUM_HIDDEN, batch_first=True)
        self.outer = torch.nn.Linear(NUM_HIDDEN, NUM_CLASSES)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.inner(mel)
        return self.outer(hidden)


def step(model: Tagger, optimizer: torch.optim.Optimizer, batch) -> float:
    """One step of training; the mean loss of its frames, padding left out."""
    mel, target = batch.data["mel"], batch.data["target"]
    real = torch.arange(mel.shape[1]) < batch.lengths[:, None]
    loss = torch.nn.functional.cross_entropy(model(mel)[real], target[real])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(paths: dict[str, Path]) -> list[float]:
    """The mean loss of every epoch."""
    model, losses = Tagger(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    feed = Feed(paths, seed=7, index="off")  # these files will not be opened another time
    dataset = FeedDataset(feed.padded(max_frames=MAX_FRAMES), num_workers=WORKERS)
    loader = DataLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    print(f"{len(loader)} batches an epoch, from {WORKERS} workers")
    for epoch in range(EPOCHS):
        total = sum(step(model, optimizer, batch) for batch in loader)
        losses.append(total / len(loader))
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small gains nothing from more
    with tempfile.TemporaryDirectory() as folder:
        losses = train(write_corpus(Path(folder)))
    print(f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
