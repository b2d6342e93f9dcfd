"""Catalogs, plans, placements and coalesced reads: pure data, checked without a file."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from asyncfeed.errors import BudgetError, FieldMismatchError
from asyncfeed.planning import strings as packed_strings
from asyncfeed.planning.catalog import Access, Catalog, FileStamp, Kind
from asyncfeed.planning.coalesce import Calls, Reads, coalesce
from asyncfeed.planning.corpus import Corpus
from asyncfeed.planning.draws import Purpose, generator
from asyncfeed.planning.orders import Order
from asyncfeed.planning.placement import place
from asyncfeed.planning.plan import ALIGNMENT, Cut, Plan
from asyncfeed.planning.planner import make_plan, needed_nbytes
from asyncfeed.planning.shares import share_of
from asyncfeed.planning.strings import Strings
from asyncfeed.units import PAGE_NBYTES

FLOATS = Kind(np.dtype("f4"), (8,))
KINDS = (FLOATS, Kind(np.dtype("u1"), (3,)), Kind(np.dtype("f8"), ()), Kind(np.dtype("i2"), (0,)))
WHOLE = Cut(whole=True)


def catalog(lengths: list[int], kinds: list[int] | None = None) -> Catalog:
    """Utterances of these lengths, whose frames look like these of `KINDS`, one after the other in one file."""
    num = len(lengths)
    kind = np.array(kinds or [0] * num, np.int32)
    nbytes = [n * KINDS[k].frame_nbytes for n, k in zip(lengths, kind.tolist(), strict=True)]
    return Catalog(
        ids=Strings.of(f"utt{i}" for i in range(num)),
        file=np.zeros(num, np.int32),
        offset=np.cumsum([0, *nbytes])[:num].astype(np.int64),
        length=np.array(lengths, np.int64),
        kind=kind,
        access=np.full(num, Access.DIRECT, np.uint8),
        swapped=np.zeros(num, np.bool_),
        files=(FileStamp("feats.h5", 0, 0, 0),),
        kinds=KINDS,
    )


def corpus_of(*catalogs: Catalog) -> Corpus:
    return Corpus({f"field{i}": c for i, c in enumerate(catalogs)})


@st.composite
def catalogs(draw: st.DrawFn, lengths: list[int], *, alike: bool | None = None) -> Catalog:
    """A catalog of these lengths, whose frames are all alike or are not."""
    alike = draw(st.booleans()) if alike is None else alike
    numbers = st.integers(0, len(KINDS) - 1)
    size = len(lengths)
    kinds = [draw(numbers)] * size if alike else draw(st.lists(numbers, min_size=size, max_size=size))
    return catalog(lengths, kinds)


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """One to three fields of up to thirty utterances, some of them empty, some far longer than the others."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 60), st.integers(0, 3000)), max_size=30))
    return corpus_of(*[draw(catalogs(lengths)) for _ in range(draw(st.integers(1, 3)))])


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """How frames, windows of any sort, and whole utterances are taken."""
    tables = draw(st.sampled_from([0, 8]))
    frames = st.just(Cut(unit_nbytes=tables))
    windows = st.builds(
        Cut, st.integers(1, 50), st.integers(1, 70), st.booleans(), st.just(False), st.just(tables)
    )  # length, hop, pad, whole, unit_nbytes
    return draw(st.one_of(frames, windows, st.just(WHOLE)))


def units_of(utt: int, start: int, stop: int, cut: Cut) -> list[tuple[int, int, int]]:
    """The units that a form takes from a slice: utterance, first frame, one past the last."""
    if cut.whole:
        return [(utt, start, stop)]
    count = int(cut.count(np.array([stop - start]))[0])
    begins = [start + k * cut.hop for k in range(count)]
    return [(utt, begin, min(begin + cut.length, stop)) for begin in begins]


def expected_units(corpus: Corpus, utt: int, cut: Cut) -> list[tuple[int, int, int]]:
    """The same from the definition of a unit, frame by frame."""
    length = int(corpus.catalogs[0].length[utt])
    if cut.whole:
        return [(utt, 0, length)]
    units, covered = [], 0
    for begin in range(0, length, cut.hop):
        complete = begin + cut.length <= length
        if complete or (cut.pad and covered < length):
            covered = min(begin + cut.length, length)
            units.append((utt, begin, covered))
    return units


def slices(plan: Plan) -> list[tuple[int, int, int]]:
    rows = [zip(p.utts.tolist(), p.starts.tolist(), p.stops.tolist(), strict=True) for p in plan]
    return [each for part in rows for each in part]


def plan_or_skip(corpus: Corpus, **options) -> Plan:
    try:
        return make_plan(corpus, **options)
    except BudgetError:
        assume(False)
        raise


PAGES = st.integers(1, 12)
SEEDS = st.integers(0, 2**70)


# -- strings and catalogs ----------------------------------------------------------------------------------------


any_bytes = st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
strings = st.lists(st.one_of(texts, any_bytes), max_size=20)


@given(strings)
def test_strings_give_back_what_went_in(wanted):
    packed = Strings.of(wanted)

    assert list(packed) == wanted
    assert [packed[i] for i in range(len(packed))] == wanted
    assert [packed[-1 - i] for i in range(len(packed))] == wanted[::-1]
    assert packed[1:7:2] == wanted[1:7:2]
    assert packed == Strings.of(iter(wanted))


@pytest.mark.parametrize("multiplier", [packed_strings.MULTIPLIER, 1])
@given(strings, strings)
@example(["ab", "ba", "", "c"], ["ba", "ab", "", "d", "ca"])
def test_strings_are_found(multiplier, there, wanted):
    """Also where many have the same hash: with a multiplier of 1 that is the sum of their bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_strings, "MULTIPLIER", multiplier)
        patch.setattr(packed_strings, "STEP", 7)
        rows = Strings.of(there).find(wanted).tolist()

    assert [row >= 0 for row in rows] == [string in there for string in wanted]
    assert all(there[row] == string for row, string in zip(rows, wanted, strict=True) if row >= 0)


def test_an_id_of_bytes_that_are_no_utf8_survives():
    utt = b"\xff\xfe caf\xe9".decode("utf-8", "surrogateescape")

    packed = Strings.of([utt])

    assert packed[0].encode("utf-8", "surrogateescape") == b"\xff\xfe caf\xe9"


@given(st.data(), strings)
def test_strings_are_picked_and_taken_by_row(data, wanted):
    rows = data.draw(st.lists(st.integers(0, len(wanted) - 1))) if wanted else []
    packed, numbers = Strings.of(wanted), np.array(rows, np.int64)

    assert packed.pick(numbers) == [wanted[i] for i in rows]
    assert packed.take(numbers) == Strings.of(wanted[i] for i in rows)


@given(st.lists(strings, max_size=5))
def test_strings_concatenate(parts):
    together = Strings.concatenate([Strings.of(part) for part in parts])

    assert together == Strings.of(s for part in parts for s in part)


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        Strings.of(["a", "b", "c"])[index]


def test_strings_cost_their_bytes_and_eight():
    packed = Strings.of(["é" * 10] * 1000)

    assert packed.nbytes == 1000 * (20 + 8)


def rows_of(catalog: Catalog) -> list[tuple[object, ...]]:
    """Every utterance as what it is, free of how files and kinds are numbered."""
    columns = zip(
        catalog.ids,
        [catalog.files[i] for i in catalog.file.tolist()],
        [catalog.kinds[i] for i in catalog.kind.tolist()],
        catalog.offset.tolist(),
        catalog.length.tolist(),
        catalog.access.tolist(),
        catalog.swapped.tolist(),
        strict=True,
    )
    return list(columns)


@given(st.data())
def test_taking_rows_of_a_catalog_keeps_them_whole(data):
    whole = data.draw(catalogs(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))))
    rows = data.draw(st.lists(st.integers(0, len(whole) - 1)))

    taken = whole.take(np.array(rows, np.int64))

    assert rows_of(taken) == [rows_of(whole)[i] for i in rows]
    assert taken.nbytes.tolist() == [whole.nbytes[i] for i in rows]


@given(st.data(), st.integers(1, 4))
def test_concatenated_catalogs_keep_their_files_and_kinds(data, num_parts):
    parts = []
    for number in range(num_parts):
        part = data.draw(catalogs(data.draw(st.lists(st.integers(0, 9), max_size=6))))
        used = data.draw(st.permutations(KINDS))  # every file numbers its kinds as it meets them
        renumber = np.array([used.index(k) for k in KINDS], np.int32)
        file = FileStamp(f"{number}.h5", number, number, number)
        parts.append(replace(part, files=(file,), kinds=tuple(used), kind=renumber[part.kind]))

    together = Catalog.concatenate(parts)

    assert rows_of(together) == [row for part in parts for row in rows_of(part)]
    assert len(set(together.kinds)) == len(together.kinds)
    assert together.file.dtype == np.int32
    assert together.kind.dtype == np.int32


# -- plans -------------------------------------------------------------------------------------------------------


@settings(max_examples=70)
@given(corpora(), cuts(), PAGES, st.booleans(), SEEDS, st.integers(0, 5), st.integers(1, 4))
@example(corpus_of(catalog([389])), Cut(20, 10, False, False, 0), 3, False, 0, 0, 1)  # a tail in no window
@example(corpus_of(catalog([3000, 0, 7])), Cut(5, 70, True, False, 8), 3, True, 0, 0, 1)  # hops beyond the end
def test_every_unit_is_planned_once_on_one_rank(corpus, cut, pages, shuffle, seed, epoch, world_size):
    options = {"partition_nbytes": pages * PAGE_NBYTES, "shuffle": shuffle, "seed": seed, "epoch": epoch, "cut": cut}

    plans = [plan_or_skip(corpus, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    found = Counter(u for plan in plans for each in slices(plan) for u in units_of(*each, cut))
    expected = Counter(u for utt in range(len(corpus)) for u in expected_units(corpus, utt, cut))
    assert found == expected
    assert sum(plan.num_utterances for plan in plans) == len(corpus)


def in_order(plan: Plan) -> list[tuple[int, int, int]]:
    """The units of a plan of frames or windows, as they are handed out."""
    units = []
    for partition in plan:
        of_slices = zip(partition.utts.tolist(), partition.starts.tolist(), partition.stops.tolist(), strict=True)
        here = [unit for each in of_slices for unit in units_of(*each, plan.cut)]
        order = np.arange(partition.before + len(here) + partition.after, dtype=np.int32)
        if plan.shuffle:
            plan.order_units(partition, order)
        units += [here[k - partition.before] for k in order.tolist() if 0 <= k - partition.before < len(here)]
    return units


@settings(max_examples=100)
@given(corpora(), cuts(), PAGES, st.booleans(), SEEDS, st.integers(1, 9))
@example(corpus_of(catalog([5])), Cut(unit_nbytes=8), 1, True, 0, 7)  # ranks without a frame, on both sides of others
@example(corpus_of(catalog([0, 0, 1, 0])), Cut(unit_nbytes=8), 1, True, 0, 3)
@example(corpus_of(catalog([3000, 7])), Cut(5, 70, True, False, 8), 3, True, 0, 3)
def test_every_rank_goes_through_a_part_of_one_order(corpus, cut, pages, shuffle, seed, world_size):
    """So the order of an epoch, and what is shuffled together, does not depend on the number of ranks."""
    assume(not cut.whole)
    options = {"partition_nbytes": pages * PAGE_NBYTES, "shuffle": shuffle, "seed": seed, "cut": cut}
    place = {unit: n for n, unit in enumerate(in_order(plan_or_skip(corpus, **options)))}

    plans = [make_plan(corpus, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    places = [[place[unit] for unit in in_order(plan)] for plan in plans]
    assert sorted(n for each in places for n in each) == list(range(len(place)))
    assert all(each == sorted(each) for each in places)
    if shuffle:
        assert max(map(len, places)) - min(map(len, places)) <= 1


@settings(max_examples=50)
@given(corpora(), cuts(), PAGES, SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_the_runs_of_parts_of_a_rank_are_the_run_of_the_rank(corpus, cut, pages, seed, world_size, parts):
    assume(not cut.whole)
    options = {"partition_nbytes": pages * PAGE_NBYTES, "seed": seed, "cut": cut}
    whole = plan_or_skip(corpus, **options)

    ranks = [share_of(whole, rank, world_size) for rank in range(world_size)]
    divided = [share_of(whole, rank, world_size * parts) for rank in range(world_size * parts)]

    for rank, plan in enumerate(ranks):
        own = [unit for part in divided[rank * parts : (rank + 1) * parts] for unit in in_order(part)]
        assert sorted(own) == sorted(in_order(plan))


@settings(max_examples=70)
@given(corpora(), cuts(), PAGES, st.booleans())
@example(
    corpus_of(catalog([389])), Cut(20, 10, False, False, 0), 3, False
)  # 37 windows fit, and not the 9 frames after
def test_no_partition_takes_more_than_its_size(corpus, cut, pages, shuffle):
    plan = plan_or_skip(corpus, partition_nbytes=pages * PAGE_NBYTES, shuffle=shuffle, cut=cut)

    assert all(len(partition) for partition in plan)
    assert plan.max_partition_nbytes <= plan.partition_nbytes


@given(corpora(), cuts(), PAGES, st.booleans())
def test_an_utterance_that_fits_is_not_cut(corpus, cut, pages, shuffle):
    plan = plan_or_skip(corpus, partition_nbytes=pages * PAGE_NBYTES, shuffle=shuffle, cut=cut)

    lengths = corpus.catalogs[0].length
    pieces = Counter(plan.utts.tolist())
    per_unit = ALIGNMENT * len(corpus.fields)
    for utt, start, stop in slices(plan):
        units = 0 if cut.whole else len(expected_units(corpus, utt, cut))
        takes = int(corpus.nbytes[utt]) + per_unit + units * cut.unit_nbytes
        if takes <= plan.partition_nbytes - ALIGNMENT * (len(corpus.fields) + 1):
            assert (pieces[utt], start, stop) == (1, 0, lengths[utt])


@st.composite
def demanding(draw: st.DrawFn) -> tuple[Corpus, Cut]:
    """Utterances, or windows of them, that hardly go into a few pages."""
    lengths = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=8))
    fields = [draw(catalogs(lengths)) for _ in range(draw(st.integers(1, 2)))]
    fields[0] = replace(fields[0], kind=np.append(np.int32(0), fields[0].kind[1:]))
    length, hop = draw(st.integers(100, 800)), draw(st.integers(1, 900))
    windows = Cut(length, hop, draw(st.booleans()), False, draw(st.sampled_from([0, 8])))
    return corpus_of(*fields), draw(st.sampled_from([windows, WHOLE]))


@settings(max_examples=70, suppress_health_check=[HealthCheck.filter_too_much])
@given(demanding(), st.integers(1, 3), st.integers(2, 4))
# the first of two utterances that are too large is the smaller one
@example((corpus_of(catalog([500, 2000])), WHOLE), 1, 2)
@example((corpus_of(catalog([600, 900], [2, 0])), Cut(550, 1, False, False, 8)), 1, 2)
def test_a_budget_error_names_the_utterance_and_the_least_that_suffices(demand, pages, segments):
    corpus, cut = demand
    options = {"shuffle": False, "cut": cut, "segments": segments}
    try:
        make_plan(corpus, partition_nbytes=pages * PAGE_NBYTES, **options)
        assume(False)
    except BudgetError as error:
        message = str(error)
    utt = re.search(r"utterance '(\w+)' takes", message)[1]
    budget = int(re.search(r"memory_budget=(\d+)", message)[1])

    partition_nbytes, rest = divmod(budget, segments)

    assert rest == 0
    assert partition_nbytes % PAGE_NBYTES == 0
    make_plan(corpus, partition_nbytes=partition_nbytes, **options)
    with pytest.raises(BudgetError, match=re.escape(f"utterance {utt!r} takes")):
        make_plan(corpus, partition_nbytes=partition_nbytes - PAGE_NBYTES, **options)


@given(corpora(), PAGES, PAGES, SEEDS, st.integers(0, 5))
def test_the_order_of_utterances_does_not_depend_on_the_partition_size(corpus, small, large, seed, epoch):
    options = {"seed": seed, "epoch": epoch, "cut": Cut(unit_nbytes=8)}

    orders = [
        list(dict.fromkeys(plan_or_skip(corpus, partition_nbytes=p * PAGE_NBYTES, **options).utts.tolist()))
        for p in (small, large)
    ]

    assert orders[0] == orders[1] == Order.of(True).rows(corpus, seed=seed, epoch=epoch).tolist()


@given(corpora(), cuts(), PAGES, SEEDS)
def test_the_same_arguments_make_the_same_plan(corpus, cut, pages, seed):
    options = {"partition_nbytes": pages * PAGE_NBYTES, "seed": seed, "cut": cut}

    first, second = plan_or_skip(corpus, **options), plan_or_skip(corpus, **options)

    assert first == second
    assert first != replace(second, epoch=1)


@given(SEEDS, st.integers(0, 2**31), st.integers(0, 2**31))
def test_two_epochs_differ(seed, one, other):
    assume(one != other)
    corpus = corpus_of(catalog([1] * 50))

    plans = [make_plan(corpus, partition_nbytes=PAGE_NBYTES, seed=seed, epoch=epoch) for epoch in (one, other)]

    assert plans[0].utts.tolist() != plans[1].utts.tolist()


def test_file_order_is_the_order_of_the_catalog_in_every_epoch():
    corpus = corpus_of(catalog([5, 0, 900, 1]))

    plans = [make_plan(corpus, partition_nbytes=2 * PAGE_NBYTES, shuffle=False, epoch=epoch) for epoch in (0, 1)]

    assert list(dict.fromkeys(plans[0].utts.tolist())) == [0, 1, 2, 3]
    assert plans[0].utts.tolist() == plans[1].utts.tolist()


def test_an_empty_corpus_has_no_partition():
    plan = make_plan(corpus_of(catalog([])), partition_nbytes=PAGE_NBYTES)

    assert list(plan) == []
    assert plan.num_utterances == plan.num_frames == plan.max_partition_nbytes == 0


@pytest.mark.parametrize(("shuffle", "world_size"), [(True, 5), (False, 3)])
def test_more_ranks_than_frames_or_utterances_leave_some_with_nothing(shuffle, world_size):
    corpus = corpus_of(catalog([3]))
    options = {"partition_nbytes": PAGE_NBYTES, "shuffle": shuffle, "world_size": world_size}

    plans = [make_plan(corpus, rank=rank, **options) for rank in range(world_size)]

    assert sorted(len(plan) for plan in plans) == ([0, 0, 1, 1, 1] if shuffle else [0, 0, 1])


def test_partitions_are_found_by_number_from_the_end_and_by_slice():
    plan = make_plan(corpus_of(catalog([100] * 9)), partition_nbytes=2 * PAGE_NBYTES, shuffle=False)

    assert len(plan) == 5
    assert plan[-1].number == 4
    assert [p.number for p in plan[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        plan[5]


def test_the_first_partitions_are_small_so_that_the_first_frame_comes_early():
    corpus = corpus_of(catalog([32768] * 200))  # a MiB each

    plan = make_plan(corpus, partition_nbytes=1 << 27)

    assert [len(partition) for partition in plan] == [16, 32, 64, 88][: len(plan)]


def test_fields_of_different_lengths_are_planned_as_whole_utterances_only():
    corpus = corpus_of(catalog([4, 5]), catalog([4, 6]))

    plan = make_plan(corpus, partition_nbytes=PAGE_NBYTES, cut=WHOLE)

    assert plan.num_utterances == 2
    with pytest.raises(FieldMismatchError, match=r"'utt1' has 5 frames in field 'field0' but 6 in field 'field1'"):
        make_plan(corpus, partition_nbytes=PAGE_NBYTES)


@given(corpora(), st.booleans(), st.sampled_from([0, 8]))
def test_what_is_needed_is_a_single_partition(corpus, shuffle, tables):
    assume(len(corpus))
    needed = needed_nbytes(corpus, tables)

    plan = make_plan(corpus, partition_nbytes=needed, shuffle=shuffle, cut=Cut(unit_nbytes=tables))

    assert len(plan) == 1


def test_a_million_utterances_are_planned_without_an_object_for_each():
    num = 1_000_000
    lengths = np.random.default_rng(0).integers(0, 2000, num)
    million = replace(
        catalog([1]),
        ids=Strings(np.full(num, ord("u"), np.uint8), np.arange(1, num + 1)),
        length=lengths,
        **{name: np.zeros(num, np.int32) for name in ("file", "offset", "kind", "access", "swapped")},
    )
    corpus = corpus_of(million)

    tracemalloc.start()
    try:
        plan = make_plan(corpus, partition_nbytes=1 << 29, cut=Cut(unit_nbytes=8))
        kept, peak = tracemalloc.get_traced_memory()
        blocks = sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))
    finally:
        tracemalloc.stop()

    assert plan.num_utterances == num
    assert blocks < 1000
    assert kept < 40 * num  # the order, starts, bytes and bytes per frame: 8 each
    assert peak < 80 * num  # a list of int would add 40


# -- draws -------------------------------------------------------------------------------------------------------

keys = st.tuples(SEEDS, st.integers(0, 2**32 - 1), st.sampled_from(Purpose), st.integers(0, 2**32 - 1))


@given(st.lists(keys, min_size=2, max_size=20, unique=True))
@example([(2**32 + 1, 1, Purpose.UTTERANCES, 0), (1, 1, Purpose.UTTERANCES, 1)])
@example([(0, 0, Purpose.FRAMES, 0), (0, 0, Purpose.FRAMES, 1), (0, 0, Purpose.BLOCKS, 0), (0, 1, Purpose.FRAMES, 0)])
def test_no_two_keys_draw_alike(found):
    first_draws = {tuple(generator(*key).integers(0, 2**63, 4).tolist()) for key in found}

    assert len(first_draws) == len(found)


@given(keys)
def test_a_key_always_draws_the_same(key):
    assert generator(*key).integers(0, 2**63, 4).tolist() == generator(*key).integers(0, 2**63, 4).tolist()


def test_the_order_that_a_seed_stands_for_never_changes():
    order = Order.of(True).rows(corpus_of(catalog([1] * 10)), seed=1, epoch=2)

    assert order.tolist() == [7, 5, 9, 4, 2, 1, 6, 8, 3, 0]


# -- placement ---------------------------------------------------------------------------------------------------


@settings(max_examples=70)
@given(corpora(), cuts(), PAGES, st.booleans(), st.integers(1, 4))
def test_slices_are_aligned_and_disjoint_and_inside_the_partition(corpus, cut, pages, shuffle, world_size):
    options = {"partition_nbytes": pages * PAGE_NBYTES, "shuffle": shuffle, "cut": cut, "world_size": world_size}
    plan = plan_or_skip(corpus, rank=world_size - 1, **options)

    for partition in plan:
        placement = place(partition, corpus, cut)
        assert placement.nbytes <= partition.nbytes <= plan.partition_nbytes
        if placement.num_units:
            units = partition.before + placement.num_units + partition.after
            assert placement.tables + 4 * units <= partition.nbytes
        used = [(placement.tables, placement.nbytes)]
        for field in placement.fields:
            used += zip(field.begin.tolist(), (field.begin + field.nbytes).tolist(), strict=True)
            aligned = field.begin if field.kind is None else field.begin[:1]
            assert not np.any(aligned % ALIGNMENT)
        used = sorted(span for span in used if span[0] < span[1])
        assert all(before[1] <= after[0] for before, after in pairwise(used))


@given(corpora(), PAGES)
def test_slices_that_are_alike_are_packed_as_rows_of_one_array(corpus, pages):
    plan = plan_or_skip(corpus, partition_nbytes=pages * PAGE_NBYTES)

    for partition in plan:
        for source, field in zip(corpus.catalogs, place(partition, corpus, plan.cut).fields, strict=True):
            kinds = {source.kinds[k] for k in source.kind[partition.utts[field.lengths > 0]].tolist()}
            if kinds:  # what has no frames fits any array of frames
                assert (field.kind is None) == (len(kinds) > 1)
            if field.kind is not None:
                assert kinds <= {field.kind}
                assert np.array_equal(field.begin[1:], (field.begin + field.nbytes)[:-1])


@given(corpora(), cuts(), PAGES)
def test_the_tables_have_an_entry_for_every_unit(corpus, cut, pages):
    plan = plan_or_skip(corpus, partition_nbytes=pages * PAGE_NBYTES, cut=cut)
    memory = np.zeros(plan.partition_nbytes, np.uint8)

    for partition in plan:
        order, owners = place(partition, corpus, cut).tables_of(memory)
        num_units = int(cut.count(partition.lengths).sum()) if cut.unit_nbytes else 0
        assert order.size == owners.size == num_units
        assert not np.shares_memory(order, owners)


def test_every_field_has_its_own_length_in_whole_utterances():
    corpus = corpus_of(catalog([4, 0, 7]), catalog([9, 3, 0]))
    (partition,) = make_plan(corpus, partition_nbytes=PAGE_NBYTES, shuffle=False, cut=WHOLE)

    placement = place(partition, corpus, WHOLE)

    assert [field.lengths.tolist() for field in placement.fields] == [[4, 0, 7], [9, 3, 0]]
    assert [field.nbytes.sum() for field in placement.fields] == [11 * 32, 12 * 32]


# -- coalescing --------------------------------------------------------------------------------------------------


class FakeFiles:
    """Files of random bytes, and a memory, that record what is done to them."""

    def __init__(self, num: int = 3, nbytes: int = 500, memory: int = 4000) -> None:
        self.files = np.random.default_rng(0).integers(1, 256, (num, nbytes), dtype=np.uint8)
        self.memory = np.zeros(memory, np.uint8)

    def execute(self, calls: Calls) -> None:
        for call in range(len(calls)):
            position = int(calls.offset[call])
            for piece in range(calls.edges[call], calls.edges[call + 1]):
                dest, nbytes = int(calls.dest[piece]), int(calls.nbytes[piece])
                if dest >= 0:
                    self.memory[dest : dest + nbytes] = self.files[calls.file[call], position : position + nbytes]
                position += nbytes
            assert position <= self.files.shape[1]


@st.composite
def reads(draw: st.DrawFn) -> Reads:
    """Up to thirty ranges of three files: adjacent, apart, overlapping, or the same again."""
    ranges = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(1, 100)), max_size=30))
    file, offset, nbytes = (np.array(c, np.int64) for c in (zip(*ranges, strict=True) if ranges else ([], [], [])))
    dest = np.cumsum(nbytes) - nbytes
    return Reads(file.astype(np.int32), offset, nbytes, dest.astype(np.int64), np.arange(len(ranges)))


def wanted_memory(files: FakeFiles, wanted: Reads) -> np.ndarray:
    memory = np.zeros_like(files.memory)
    for file, offset, nbytes, dest in zip(wanted.file, wanted.offset, wanted.nbytes, wanted.dest, strict=True):
        memory[dest : dest + nbytes] = files.files[file, offset : offset + nbytes]
    return memory


bounds = st.fixed_dictionaries(
    {"max_gap": st.integers(0, 60), "max_pieces": st.integers(1, 8), "max_nbytes": st.integers(1, 300)}
)


@settings(max_examples=70)
@given(reads(), bounds)
def test_coalesced_calls_read_exactly_what_was_wanted(wanted, bounds):
    files = FakeFiles()

    files.execute(coalesce(wanted, **bounds))

    assert np.array_equal(files.memory, wanted_memory(files, wanted))


@settings(max_examples=70)
@given(reads(), bounds)
def test_calls_and_gaps_are_bounded(wanted, bounds):
    calls = coalesce(wanted, **bounds)

    gaps = calls.dest < 0
    assert np.all(calls.nbytes[gaps] <= bounds["max_gap"])
    assert np.all(calls.nbytes[gaps] > 0)
    assert gaps.sum() < max(wanted.file.size, 1)
    pieces = np.diff(calls.edges)
    assert np.all((pieces >= 1) & (pieces <= bounds["max_pieces"]))
    for first, last in zip(calls.edges[:-1], calls.edges[1:], strict=True):
        assert calls.nbytes[first : last - 1].sum() < bounds["max_nbytes"]  # a piece more may cross the limit


@given(reads(), bounds)
def test_every_piece_knows_whose_it_is(wanted, bounds):
    calls = coalesce(wanted, **bounds)

    real = calls.dest >= 0
    owners = dict(zip(wanted.dest.tolist(), wanted.owner.tolist(), strict=True))
    assert [owners[d] for d in calls.dest[real].tolist()] == calls.owner[real].tolist()
    assert set(calls.owner[~real].tolist()) <= set(wanted.owner.tolist())


def simple(offsets: list[int], nbytes: list[int], files: list[int] | None = None) -> Reads:
    sizes = np.array(nbytes, np.int64)
    return Reads(
        np.array(files or [0] * len(offsets), np.int32),
        np.array(offsets, np.int64),
        sizes,
        np.cumsum(sizes) - sizes,
        np.arange(len(offsets)),
    )


def test_neighbours_become_one_call_across_small_gaps():
    calls = coalesce(simple([30, 0, 12], [5, 10, 10]), max_gap=8)

    assert calls.offset.tolist() == [0]
    assert calls.nbytes.tolist() == [10, 2, 10, 8, 5]
    assert calls.dest.tolist() == [5, -1, 15, -1, 0]


def test_a_large_gap_and_another_file_start_a_call():
    calls = coalesce(simple([0, 100, 110], [10, 10, 10], [0, 0, 1]), max_gap=8)

    assert list(zip(calls.file.tolist(), calls.offset.tolist(), strict=True)) == [(0, 0), (0, 100), (1, 110)]


def test_repeated_and_overlapping_ranges_start_calls_of_their_own():
    calls = coalesce(simple([0, 0, 5], [10, 10, 10]))

    assert calls.offset.tolist() == [0, 0, 5]
    assert calls.nbytes.tolist() == [10, 10, 10]


def test_nothing_wanted_is_no_call():
    assert len(coalesce(simple([], []))) == 0


def test_as_many_pieces_as_linux_takes_go_into_one_call():
    calls = coalesce(simple(list(range(0, 40_000, 10)), [10] * 4000))

    assert np.diff(calls.edges).tolist() == [1022, 1022, 1022, 934]
