"""The examples run as they stand, against the installed package."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(script: Path, folder: Path) -> str:
    """What a script prints, run as users run it, but with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    return tmp_path


def test_the_quickstart_streams_one_file_in_every_form(folder):
    printed = run(EXAMPLES / "quickstart.py", folder)

    forms = [line.split(":")[0] for line in printed.splitlines()]
    assert forms == [
        "budget",
        "plan",
        "triplets",
        "utterances",
        "batches",
        "windows",
        "partitions",
        "statistics",
        "plain for",
    ]
    assert "the first triplet in file order is ('speaker0/utt000', 0, float32 (80,))" in printed
    assert list(folder.iterdir()) == []


def test_the_training_loop_reaches_a_falling_loss(folder):
    printed = run(EXAMPLES / "train_async.py", folder)

    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert "verdict: " in printed
    assert list(folder.iterdir()) == []


def test_the_recipe_extracts_once_and_trains_from_the_cache(folder):
    printed = run(EXAMPLES / "extract_and_train.py", folder)

    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert printed.startswith("features: 40 computed, 0 there already, 0 failed")
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("script", ["train_torch.py", "train_dataloader.py"])
def test_torch_trains_on_padded_batches(folder, script):
    pytest.importorskip("torch")

    printed = run(EXAMPLES / script, folder)

    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert printed.startswith("15 batches an epoch, ")
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor")] == []  # torch's own


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is there")
@pytest.mark.parametrize("script", ["train_torch.py", "train_dataloader.py"])
def test_without_torch_an_example_says_what_to_install(script):
    done = subprocess.run([sys.executable, EXAMPLES / script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (1, 'this example needs torch: pip install "asyncfeed[torch]"\n')


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "quickstart.py",
        "train_async.py",
        "train_torch.py",
        "train_dataloader.py",
        "extract_and_train.py",
    }


def test_the_example_of_the_readme_runs_as_it_is_printed(folder):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", readme, re.DOTALL)[1]
    script = folder / "readme.py"
    script.write_text(example, encoding="utf-8")

    printed = run(script, folder)

    frames, floats = sum(200 + n for n in range(100)), 80
    assert printed.startswith(f"{frames * floats * 4 / 2**20:.3g} MiB in ")
