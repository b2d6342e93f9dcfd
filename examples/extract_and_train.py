"""The two stages of a recipe: extract features of a folder of wav files into a cache, then train from the cache.

The features are log-mel spectra, which stand for something more expensive. The model predicts every frame from the
four before it, so that it needs no labels: any folder of 16-bit wav files will do. Run it twice with the same folder for
the cache, and the second time nothing is extracted; kill it during the first stage, and it goes on where it was.

python examples/extract_and_train.py                          # makes some recordings of its own
python examples/extract_and_train.py wavs/ --cache exp/feats
"""

import argparse
import asyncio
import sys
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from asyncfeed import CachedItem, Feed

RATE, WINDOW, HOP, NUM_MELS = 16_000, 400, 160, 40
CONTEXT, EPOCHS, BATCH, STEP = 4, 4, 128, 0.01


# -- stage 1: features -----------------------------------------------------------------------------------------------


def mel_filters() -> np.ndarray:
    """Triangles that are equally wide on the mel scale; (WINDOW // 2 + 1, NUM_MELS)."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 1400), NUM_MELS + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.maximum(np.minimum(rising, falling), 0)


FILTERS = mel_filters()


def log_mel(utt: str, signal: np.ndarray) -> np.ndarray:
    """Log-mel spectrum, (frames, NUM_MELS) float32."""
    frames = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2
    return np.log(power @ FILTERS + 1e-6).astype("float32")


def recordings(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Rows for the cache: an id, and the arguments of the function after it."""
    for path in sorted(folder.glob("*.wav")):
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
            yield path.stem, samples[:: file.getnchannels()] / 32768


async def extract(folder: Path, item: CachedItem) -> None:
    """Compute what is not in the cache yet, then seal it."""
    report = await item.populate(recordings(folder), progress=sys.stderr.isatty(), on_error="skip")
    print(f"features: {report}")
    await item.to_reader()


# -- stage 2: training -----------------------------------------------------------------------------------------------


class Predictor:
    """A linear map from some frames to the next one, trained by gradient descent."""

    def __init__(self) -> None:
        self.weights = np.zeros((CONTEXT * NUM_MELS + 1, NUM_MELS))

    def step(self, windows: np.ndarray) -> float:
        """One step of training on (batch, CONTEXT + 1, NUM_MELS); the mean squared error before it."""
        past = windows[:, :CONTEXT].reshape(len(windows), -1)
        inputs = np.append(past, np.ones((len(windows), 1)), axis=1)
        error = inputs @ self.weights - windows[:, CONTEXT]
        self.weights -= STEP / CONTEXT * (inputs.T @ error) / len(windows)
        return float((error**2).mean())


async def train(item: CachedItem) -> list[float]:
    """The mean loss of every epoch."""
    model, losses = Predictor(), []
    async with Feed(item) as feed:
        for epoch in range(EPOCHS):
            batch, steps = [], []
            async for window in feed.windows(length=CONTEXT + 1, hop=2):
                batch.append(window.frames)
                if len(batch) == BATCH:
                    steps.append(model.step(np.stack(batch) / 10))
                    batch.clear()
            losses.append(float(np.mean(steps)))
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


# -- something to try it on --------------------------------------------------------------------------------------------


def record(folder: Path, num: int = 40) -> None:
    """Write wav files of tones that glide, two to four seconds each."""
    rng = np.random.default_rng(0)
    for number in range(num):
        time = np.arange(int(RATE * rng.uniform(2, 4))) / RATE
        pitch = rng.uniform(100, 300) * (1 + 0.3 * np.sin(2 * np.pi * rng.uniform(0.5, 2) * time))
        phase = 2 * np.pi * np.cumsum(pitch) / RATE
        tones = sum(np.sin(k * phase) / k for k in range(1, 12))
        noisy = 0.2 * tones + 0.02 * rng.normal(size=time.size)
        with wave.open(str(folder / f"utt{number:03d}.wav"), "wb") as file:
            file.setnchannels(1), file.setsampwidth(2), file.setframerate(RATE)
            file.writeframes((noisy * 16384).clip(-32768, 32767).astype(np.int16).tobytes())


async def recipe(wavs: Path, cache: Path) -> None:
    """Both stages."""
    # What decides about the result is in the version: change it together with the function.
    version = f"log-mel-{NUM_MELS}/window-{WINDOW}/hop-{HOP}"
    item = CachedItem(cache, log_mel, takes=("id", "signal"), provides=("mel",), version=version, mode="w")
    async with item:
        await extract(wavs, item)
        print(f"cache: {len(item)} utterances in {cache}")
        losses = await train(item)
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss did not fall: {losses}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wavs", type=Path, nargs="?", help="a folder of 16-bit, 16 kHz wav files")
    parser.add_argument("--cache", type=Path, help="where the features are kept; by default, nowhere")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wavs = arguments.wavs or Path(temporary)
        if arguments.wavs is None:
            record(wavs)
        asyncio.run(recipe(wavs, arguments.cache or Path(temporary) / "exp" / "feats"))


if __name__ == "__main__":
    main()
