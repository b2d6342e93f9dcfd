"""The examples run as they stand, against the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example: str, folder: Path) -> str:
    """What an example prints, run as users run it but with warnings as errors; in a folder that it must leave empty."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / example],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    return tmp_path


def test_the_quickstart_streams_one_file_in_every_form(folder):
    printed = run("quickstart.py", folder)

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


def test_the_training_loop_reaches_a_falling_loss(folder):
    printed = run("train_async.py", folder)

    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert "verdict: " in printed


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"quickstart.py", "train_async.py"}
