"""What the commands print: plain facts in, rich renderables out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from asyncfeed.cli.bench import Bench, Contest
from asyncfeed.cli.contents import WHY, Contents, Obstacle, Share
from asyncfeed.cli.demo import BUDGET, DIM, Story
from asyncfeed.cli.epoch import Epoch
from asyncfeed.cli.outline import Outline, Row
from asyncfeed.cli.sidecar import Written
from asyncfeed.planning import orders
from asyncfeed.planning.catalog import Access, Kind
from asyncfeed.planning.layouts import Suggestion
from asyncfeed.planning.mixing import Mixing
from asyncfeed.units import format_nbytes

__all__ = [
    "bench_report",
    "demo_report",
    "epoch_report",
    "index_report",
    "inspect_report",
    "plan_report",
    "suggestion_report",
    "visible",
]

NAMES_SHOWN = 3
"""Datasets that are named for every reason why some cannot be streamed, unless all were asked for."""

KINDS_SHOWN = 10
"""Shapes and dtypes of frames that are listed; images of all sizes may have thousands."""


def visible(text: str) -> str:
    """The text with everything that could move the cursor, or cannot be printed, written out: ids may hold any bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# -- inspect ---------------------------------------------------------------------------------------------------------


def inspect_report(contents: Contents, show_all: bool = False) -> RenderableType:
    """The tables of ``inspect``."""
    total = contents.total
    parts: list[RenderableType] = [_title(_files(contents)), _facts(_totals(contents))]
    if total.utterances:
        parts += [_kind_table(contents.kinds), _access_table(contents.access)]
    refused = [o for o in contents.obstacles if not o.harmless]
    passed = [o for o in contents.obstacles if o.harmless]
    if refused:
        parts.append(_obstacle_list("Cannot be streamed", 'refused unless unreadable="skip"', refused, show_all))
    if passed:
        parts.append(_obstacle_list("Passed over", "no utterances", passed, show_all))
    return Group(*parts)


def suggestion_report(contents: Contents, width: int) -> Iterator[tuple[RenderableType, bool]]:
    """What to write to stream it, and why; and of each part whether it may be folded. Code may not: it is copied."""
    if contents.suggestions:
        yield Text("  Streams as", "bold"), True
    for each in contents.suggestions:
        lines = each.code(width - 4).splitlines()
        yield Text("\n".join(f"    {visible(line)}" for line in lines), "green"), False
        yield Padding(Text(visible(each.reason), "dim"), (0, 0, 0, 6)), True
        if command := _command_line(each):
            yield Text(f"      {command}", "cyan"), False


def _command_line(suggestion: Suggestion) -> str:
    """What to type to stream it. Empty if that goes without saying, takes several fields, or cannot be typed."""
    (_, path, given), *others = suggestion.fields
    words = ["asyncfeed", "stream", path, *(word for name, value in given.items() for word in (f"--{name}", value))]
    line = shlex.join(words)
    return line if given and not others and line.isprintable() else ""


def _files(contents: Contents) -> str:
    first, *others = contents.files
    return first.path + (f" and {len(others)} more" if others else "")


def _totals(contents: Contents) -> list[tuple[str, str]]:
    total, lengths = contents.total, contents.lengths
    facts = [("on disk", format_nbytes(sum(f.size for f in contents.files))), ("key", contents.key)]
    facts.append(("utterances", f"{total.utterances:,}"))
    if lengths is None:
        return [*facts, ("", "No dataset can be streamed under this key; --key says where utterances lie.")]
    empty = f"; {lengths.num_empty:,} have none" if lengths.num_empty else ""
    median = f"{lengths.median:,.1f}".removesuffix(".0")
    return [
        *facts,
        ("frames", f"{total.frames:,}"),
        ("per utterance", f"min {lengths.least:,}, median {median}, max {lengths.most:,}{empty}"),
        ("in memory", format_nbytes(total.nbytes)),
        ("read directly", f"{_percent(contents.direct)} of the bytes"),
    ]


def _kind_table(kinds: dict[Kind, Share]) -> Table:
    table = _table("frames of", "utterances", "frames", "bytes")
    shown = list(kinds.items())[:KINDS_SHOWN]
    for kind, share in shown:
        table.add_row(str(kind), f"{share.utterances:,}", f"{share.frames:,}", format_nbytes(share.nbytes))
    if len(shown) < len(kinds):
        table.add_row(Text(f"{len(kinds) - len(shown):,} more shapes and dtypes", "dim"), "", "", "")
    return table


def _access_table(access: dict[Access, Share]) -> Table:
    table = _table("layout", "utterances", "bytes", "is read", left=("is read",))
    for each, share in access.items():
        style = "green" if each is Access.DIRECT else "yellow"
        table.add_row(Text(each.name, style), f"{share.utterances:,}", format_nbytes(share.nbytes), WHY[each])
    return table


def _obstacle_list(title: str, meaning: str, obstacles: list[Obstacle], show_all: bool) -> RenderableType:
    number = sum(len(o.names) for o in obstacles)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="bold")
    grid.add_column(overflow="fold")
    for each in obstacles:
        shown = each.names if show_all else each.names[:NAMES_SHOWN]
        more = f" and {len(each.names) - len(shown):,} more (--all)" if len(shown) < len(each.names) else ""
        grid.add_row(f"{len(each.names):,}", visible(each.reason))
        grid.add_row("", Text(f"cure: {visible(each.remedy)}", "green"))
        grid.add_row("", Text(", ".join(map(visible, shown)) + more, "dim"))
    return Group(Text.assemble("  ", (title, "bold"), f": {number:,} ({meaning})"), Padding(grid, (0, 0, 1, 2)))


# -- plan ------------------------------------------------------------------------------------------------------------


def plan_report(outline: Outline) -> RenderableType:
    """The tables of ``plan``."""
    plan, budget = outline.plan, outline.budget
    cut = f"; {outline.num_cut:,} are cut, being larger than one partition" if outline.num_cut else ""
    rank = [("rank", f"{plan.rank} of {plan.world_size}")] if plan.world_size > 1 else []
    facts = [
        ("epoch", str(plan.epoch)),
        *rank,
        ("order", f"shuffled, seed {plan.seed}" if plan.shuffle else "as in the file"),
        ("utterances", f"{plan.num_utterances:,}{cut}"),
        ("frames", f"{plan.num_frames:,}"),
        ("partitions", f"{len(plan):,}, each at most {format_nbytes(plan.partition_nbytes)}"),
        ("budget", f"{format_nbytes(budget.nbytes)}: {budget.reason}"),
        ("measured", str(budget.measured)),
        (
            "peak memory",
            f"{format_nbytes(outline.peak_nbytes)} shared: {outline.num_segments} x {format_nbytes(outline.segment_nbytes)}",
        ),
    ]
    table = _table("partition", "utterances", "frames", "memory", "begins with", left=("begins with",))
    table.columns[0].justify = "right"
    _add_partitions(table, outline.first)
    if outline.num_hidden:
        table.add_row("...", Text(f"{outline.num_hidden:,} more", "dim"), "", "", "")
    _add_partitions(table, outline.last)
    return Group(_facts(facts), table) if len(plan) else _facts(facts)


def _add_partitions(table: Table, rows: Iterable[Row]) -> None:
    for row in rows:
        table.add_row(
            str(row.number),
            f"{row.utterances:,}",
            f"{row.frames:,}",
            format_nbytes(row.nbytes),
            Text(visible(row.first), "dim"),
        )


def mixing_report(mixings: Mapping[orders.Kind, Mixing], chosen: orders.Kind) -> RenderableType:
    """What ``plan --mixing`` says: 0 is file order, 1 a perfect shuffle."""
    table = _table("order", "mixing", "random reads", "", left=("",))
    for kind, mixing in mixings.items():
        share = mixing.random_nbytes / mixing.nbytes if mixing.nbytes else 0.0
        table.add_row(
            kind,
            f"{mixing.number:.3f}",
            f"{format_nbytes(mixing.random_nbytes)} ({_percent(share)})",
            Text("this plan" if kind == chosen else "", "dim"),
        )
    return table


# -- index -----------------------------------------------------------------------------------------------------------


def index_report(written: Written) -> RenderableType:
    """What ``index`` says about one file."""
    return _facts(
        [
            ("wrote", str(written.place)),
            ("bytes", format_nbytes(written.nbytes)),
            ("utterances", f"{written.utterances:,} under {written.key}"),
            (
                "saves",
                f"{written.seconds:.2f} s of scanning whenever a feed opens {written.source}, until it is changed",
            ),
        ]
    )


# -- stream ----------------------------------------------------------------------------------------------------------


def epoch_report(epoch: Epoch) -> RenderableType:
    """What ``stream`` says in the end."""
    stats = epoch.statistics
    return _facts(
        [
            ("streamed", f"{epoch.items:,} {epoch.unit} in {epoch.seconds:.2f} s"),
            (
                "rate",
                f"{_rate(epoch.items, epoch.seconds)} and {format_nbytes(int(stats.nbytes / epoch.seconds))} per second",
            ),
            ("read", f"{format_nbytes(stats.nbytes)} in {stats.partitions:,} partitions, {stats.read_seconds:.2f} s"),
            ("memory", f"{format_nbytes(stats.peak_shared_nbytes)} shared at most, {stats.segments} segments"),
            ("verdict", stats.verdict),
        ]
    )


# -- bench -----------------------------------------------------------------------------------------------------------


def bench_report(bench: Bench) -> RenderableType:
    """The table of ``bench``."""
    part = "all" if bench.utterances == bench.all_utterances else f"the first {bench.utterances:,} of"
    order = "in random order" if bench.shuffle else "in file order"
    said = (
        f"{part} {bench.all_utterances:,} utterances, {format_nbytes(bench.nbytes)}, {order}; "
        f"warm cache, by turns, median of {bench.rounds}"
    )
    table = _table("per second", "plain h5py", "asyncfeed", "ratio")
    for contest in bench.contests:
        table.add_row(*([contest.work, "-", "-", "-"] if contest.trouble else _contest_row(contest)))
    troubles = [Text(f"{c.work}: {visible(c.trouble)}\n", "yellow") for c in bench.contests if c.trouble]
    return Group(_title(bench.path), Text(said, "dim"), table, *troubles)


def _contest_row(contest: Contest) -> list[Text]:
    cells = [
        Text.assemble(
            f"{_rate(contest.items, seconds)} {contest.unit}\n",
            (f"{format_nbytes(int(contest.nbytes / seconds))}", "dim"),
            justify="right",
        )
        for seconds in (contest.hdf5, contest.feed)
    ]
    ratio = Text(f"{contest.ratio:.3g}x", "bold green" if contest.ratio > 1 else "bold yellow")
    return [Text(contest.work), *cells, ratio]


# -- demo ------------------------------------------------------------------------------------------------------------


def demo_report(story: Story) -> RenderableType:
    """What ``demo`` tells."""
    code = (
        f'async with Feed("{story.name}", memory_budget="{BUDGET}") as feed:\n'
        "    async for utt, index, frame in feed:\n"
        "        ..."
    )
    table = _table("", *(f"epoch {each.epoch}" for each in story.epochs))
    for label, cells in _demo_rows(story):
        table.add_row(label, *cells)
    stats, plan = story.statistics, story.epochs[0].plan
    return Group(
        Text.assemble(
            "Made ",
            (story.name, "bold"),
            f" in a temporary directory: {plan.num_utterances:,} utterances, {plan.num_frames:,} frames of {DIM} floats, "
            f"{format_nbytes(story.nbytes)}. Streamed it twice:",
        ),
        Padding(Text(code, "cyan"), (1, 0, 0, 4)),
        table,
        Text(
            f"Two epochs took {stats.segments} blocks of shared memory, "
            f"{format_nbytes(stats.peak_shared_nbytes)} together, made once and used again "
            f"for {stats.partitions} partitions. The temporary directory is gone again."
        ),
    )


def _demo_rows(story: Story) -> list[tuple[str, list[str]]]:
    epochs = story.epochs
    return [
        ("frames that came", [f"{e.frames:,}" for e in epochs]),
        ("came exactly once", [_yes(e.frames == e.distinct == e.plan.num_frames) for e in epochs]),
        ("equal to what h5py reads", [_yes(not e.wrong) for e in epochs]),
        ("partitions", [str(len(e.plan)) for e in epochs]),
        ("the largest of them", [format_nbytes(e.plan.max_partition_nbytes) for e in epochs]),
        ("began with", ["\n".join(f"{utt} [{index}]" for utt, index in e.first) for e in epochs]),
        ("seconds, checks included", [f"{e.seconds:.2f}" for e in epochs]),
    ]


# -- parts -----------------------------------------------------------------------------------------------------------


def _title(text: str) -> Text:
    return Text(visible(text), "bold", overflow="fold")


def _facts(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """Names on the left, what there is to say of each on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, Text(visible(value)))
    return Padding(grid, (0, 0, 0, 1))


def _table(first: str, *others: str, left: tuple[str, ...] = ()) -> Table:
    """A table of numbers: the first column to the left, the others to the right, except those in ``left``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in left, overflow="fold")
    return table


def _rate(items: int, seconds: float) -> str:
    rate = items / seconds
    return f"{rate / 1e6:.3g} M" if rate >= 1e6 else f"{rate:,.0f}"


def _percent(share: float) -> str:
    """As a whole number, but 100% only for all and 0% only for nothing."""
    if 0 < share < 1:
        share = min(max(share, 0.01), 0.99)
    return f"{share:.0%}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"
