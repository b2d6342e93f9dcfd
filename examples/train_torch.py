"""Train a small recurrent network of torch with ``async for`` over padded batches, on the CPU.

Features and targets lie in a file each; a mapping of names to files streams them side by side. Every batch holds whole
utterances of similar length, filled up to the longest: ``batch.data["mel"]``, ``batch.data["target"]``, ``batch.lengths``.
`to_tensors` makes tensors of the arrays without copying them.

python examples/train_torch.py
"""

import asyncio
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

from asyncfeed.torch import to_tensors

NUM_CLASSES, NUM_FEATURES, NUM_HIDDEN = 5, 40, 32
EPOCHS, MAX_FRAMES, RATE = 4, 1000, 0.01


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


async def train(paths: dict[str, Path]) -> list[float]:
    """The mean loss of every epoch."""
    model, losses = Tagger(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    async with Feed(paths, seed=7, index="off") as feed:  # these files will not be opened a second time
        batches = feed.padded(max_frames=MAX_FRAMES)
        print(f"{len(batches)} batches an epoch, of which {batches.waste:.1%} is padding")
        for epoch in range(EPOCHS):
            total, num_batches = 0.0, len(batches)
            async for batch in batches:
                total += step(model, optimizer, to_tensors(batch))
            losses.append(total / num_batches)
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small gains nothing from more
    with tempfile.TemporaryDirectory() as folder:
        losses = asyncio.run(train(write_corpus(Path(folder))))
    print(f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
