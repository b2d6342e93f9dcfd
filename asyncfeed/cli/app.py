"""The shell: options in, tables out, errors as one line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from asyncfeed.cli import INTERRUPTED, tables
from asyncfeed.cli.bench import bench as run_bench
from asyncfeed.cli.contents import inspect as look_into
from asyncfeed.cli.demo import demonstrate
from asyncfeed.cli.epoch import stream as stream_epoch
from asyncfeed.cli.outline import compare_orders, outline
from asyncfeed.cli.sidecar import write_indexes
from asyncfeed.errors import AsyncFeedError
from asyncfeed.feed import Feed
from asyncfeed.storage.source import Source

__all__ = ["app", "run"]

app = typer.Typer(
    name="asyncfeed",
    help="Look into HDF5 feature files, and stream them.",
    add_completion=False,
    rich_markup_mode=None,
)

BadCommandLine: Any = typer.BadParameter.__mro__[2]
"""click's ClickException: newer releases of typer have click inside them, older ones import it."""


class Unreadable(StrEnum):
    RAISE = "raise"
    SKIP = "skip"


class Order(StrEnum):
    FILE = "file"
    UTTERANCE = "utterance"
    BLOCK = "block"
    INTERLEAVE = "interleave"


File = Annotated[str, typer.Argument(metavar="FILE", help="An HDF5 file, or a glob in quotes for several.")]
TheKey = Annotated[
    str, typer.Option("--key", metavar="PATTERN", help="Where utterances lie, like 'data/{utt}/mel'; {utt} is the id.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="PATH", help="One array that holds all utterances, in place of --key."),
]
Lengths = Annotated[str | None, typer.Option("--lengths", metavar="PATH", help="Frames of each, beside --data.")]
Offsets = Annotated[
    str | None, typer.Option("--offsets", metavar="PATH", help="Where each begins, or ends, or both, beside --data.")
]
Ids = Annotated[str | None, typer.Option("--ids", metavar="PATH", help="Their ids, beside --data; else numbered.")]
TheBudget = Annotated[
    str, typer.Option("--memory-budget", metavar="SIZE", help="Of all shared memory: 2g, 512MiB, 25%, auto.")
]
Shuffle = Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Random order, or the order of the file.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the random order.")]
Prefetch = Annotated[int, typer.Option("--prefetch", help="Partitions that are read ahead.")]
OnUnreadable = Annotated[
    Unreadable, typer.Option("--unreadable", help="What to do about datasets that cannot be streamed.")
]


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; what it returns is the exit code.

    0 for success, 1 for every error, which is told in one line on the error output, 130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an id that the terminal cannot show is no error
    try:
        command: Any = typer.main.get_command(app)
        return command.main(list(arguments) or ["--help"], "asyncfeed", standalone_mode=False) or 0
    except BadCommandLine as error:
        return _failed(f"{error.format_message()} (see asyncfeed --help)")
    except AsyncFeedError as error:
        return _failed(_one_line(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a command line shows no tracebacks
        return _failed(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _failed(message: str) -> int:
    sys.stderr.write(f"asyncfeed: {message}\n")
    return 1


def _one_line(error: AsyncFeedError) -> str:
    """The message; of one that lists several things, the first of them."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    more = " (and more: asyncfeed inspect lists all)" if len(others) > 1 else ""
    return " ".join([first, *(line.strip() for line in others[:1])]) + more


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        _print(f"asyncfeed {version('asyncfeed')}")
        raise typer.Exit


@app.command()
def inspect(
    file: File,
    key: TheKey = "{utt}",
    data: Data = None,
    lengths: Lengths = None,
    offsets: Offsets = None,
    ids: Ids = None,
    show_all: Annotated[bool, typer.Option("--all", help="Name everything that cannot be streamed.")] = False,
) -> None:
    """Show what is in a file, how it would be read, and what to write to stream it.

    Layouts, dtypes, lengths; what is read directly and what not, and why. A directory stands for the HDF5 files in it.
    """
    with _counting("looking at datasets") as progress:
        contents = look_into(Source(file, key, data, lengths, offsets, ids), progress)
    _print(tables.inspect_report(contents, show_all))
    console = Console(highlight=False, markup=False)
    for part, folding in tables.suggestion_report(contents, console.width):
        console.print(part, soft_wrap=not folding)


@app.command()
def plan(
    file: File,
    memory_budget: TheBudget = "auto",
    key: TheKey = "{utt}",
    data: Data = None,
    lengths: Lengths = None,
    offsets: Offsets = None,
    ids: Ids = None,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    epoch: Annotated[int, typer.Option("--epoch", help="Which epoch to plan, from 0.")] = 0,
    prefetch: Prefetch = 1,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Of this process; otherwise RANK.", show_default=False)
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="How many ranks; otherwise WORLD_SIZE.", show_default=False)
    ] = None,
    unreadable: OnUnreadable = Unreadable.RAISE,
    order: Annotated[
        Order | None, typer.Option("--order", help="The order; --shuffle is 'utterance'.", show_default=False)
    ] = None,
    mixing: Annotated[
        bool, typer.Option("--mixing", help="Say how well each order mixes, and the random reads it costs.")
    ] = False,
) -> None:
    """Show the partitions of an epoch and its peak memory."""
    feed = Feed(
        Source(file, key, data, lengths, offsets, ids),
        memory_budget=memory_budget,
        shuffle=shuffle if order is None else order is not Order.FILE and order.value,
        seed=seed,
        prefetch=prefetch,
        rank=rank,
        world_size=world_size,
        unreadable=unreadable.value,
    )
    feed.set_epoch(epoch)
    with feed:
        _print(tables.plan_report(outline(feed)))
        if mixing:
            _print(tables.mixing_report(compare_orders(feed), feed.plan.order.kind))


@app.command()
def index(
    file: File,
    key: TheKey = "{utt}",
    data: Data = None,
    lengths: Lengths = None,
    offsets: Offsets = None,
    ids: Ids = None,
) -> None:
    """Write the index of a file beside it.

    Feeds that find one need not scan the file.
    """
    with _counting("cataloguing datasets") as progress:
        for written in write_indexes(Source(file, key, data, lengths, offsets, ids), progress):
            _print(tables.index_report(written))


@app.command()
def stream(
    file: File,
    batches: Annotated[
        int | None, typer.Option("--batches", metavar="N", help="In batches of N frames.", show_default=False)
    ] = None,
    memory_budget: TheBudget = "auto",
    key: TheKey = "{utt}",
    data: Data = None,
    lengths: Lengths = None,
    offsets: Offsets = None,
    ids: Ids = None,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    prefetch: Prefetch = 1,
    unreadable: OnUnreadable = Unreadable.RAISE,
) -> None:
    """Stream one epoch at full speed and give a verdict."""
    feed = Feed(
        Source(file, key, data, lengths, offsets, ids),
        memory_budget=memory_budget,
        shuffle=shuffle,
        seed=seed,
        prefetch=prefetch,
        unreadable=unreadable.value,
    )
    with feed:
        total = len(feed) if batches is None else len(feed.batches(batches))
        with _bar("frames" if batches is None else "batches", total) as advance:
            epoch = stream_epoch(feed, batches, advance)
    _print(tables.epoch_report(epoch))


@app.command()
def bench(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="An HDF5 file, or a glob of files with one utterance each.")
    ],
    memory_budget: TheBudget = "auto",
    key: TheKey = "{utt}",
    data: Data = None,
    lengths: Lengths = None,
    offsets: Offsets = None,
    ids: Ids = None,
    shuffle: Shuffle = True,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long one pass of plain h5py may take; decides how much is read.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Passes of each; the median counts.")] = 3,
    unreadable: OnUnreadable = Unreadable.RAISE,
) -> None:
    """Compare plain h5py and asyncfeed on a file.

    Both by turns, in one run, over the same utterances.
    """
    with _status("warming up") as report:
        result = run_bench(
            Source(file, key, data, lengths, offsets, ids),
            seconds=seconds,
            rounds=rounds,
            shuffle=shuffle,
            report=report,
            memory_budget=memory_budget,
            unreadable=unreadable.value,
        )
    _print(tables.bench_report(result))


@app.command()
def demo() -> None:
    """Make a small feature file, stream it, tell what happened."""
    with _status("streaming a file of random features"):
        story = demonstrate()
    _print(tables.demo_report(story))


# -- the terminal ------------------------------------------------------------------------------------------------------


def _print(what: Any) -> None:
    Console(highlight=False, markup=False).print(what)


def _live() -> Console:
    """What moves while a command is at work goes to the error output, and only to a terminal."""
    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner; gives a function that changes what stands beside it."""
    with _live().status(text) as status:
        yield status.update


@contextlib.contextmanager
def _counting(text: str) -> Iterator[Callable[[int], None]]:
    """A spinner that counts; gives the function that counts on."""
    total = 0
    with _status(text) as report:

        def advance(number: int) -> None:
            nonlocal total
            total += number
            report(f"{text}: {total:,}")

        yield advance


@contextlib.contextmanager
def _bar(unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; gives the function that advances it."""
    console = _live()
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda number: bar.advance(task, number)


class _Speed(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s", "cyan")
