"""What memory there is, measured, and what of it a feed takes."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfeed import ArgumentError, Budget, BudgetError, Feed, MemoryBudget
from asyncfeed.memory.budget import MAX_AUTO, Limit, Measurement, measure, resolve
from asyncfeed.units import GIB, KIB, MIB, PAGE_NBYTES, format_nbytes, parse_nbytes, parse_share

# -- units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2g", 2 * GIB),  # audiomate's spellings
        ("500m", 500 * MIB),
        ("10k", 10 * KIB),
        ("1.5G", 3 * GIB // 2),
        ("123", 123),
        ("512MiB", 512 * MIB),
        ("512mib", 512 * MIB),
        ("512MB", 512 * MIB),
        ("1.5 GB", 3 * GIB // 2),
        ("  4 KiB ", 4 * KIB),
        (".5k", 512),
        ("1.k", KIB),
        ("1T", 1024 * GIB),
        ("7B", 7),
        (4096, 4096),
        (np.int64(4096), 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "size",
    ["", "g", "two", "2x", "2 g b", "-1", "-1g", "1e3", "1,5g", "2g 3g", "nan", ".", 1.5, None, b"2g", [1], True],
)
def test_what_is_no_size_is_refused_with_an_example(size):
    with pytest.raises(ArgumentError, match="is not a size; write it like '2g'"):
        parse_nbytes(size)


@pytest.mark.parametrize("size", [0, "0", "0g", "0.0", -5, ".1"])
def test_nothing_is_none_and_not_no_limit(size):
    with pytest.raises(ArgumentError, match="leaves no memory at all"):
        parse_nbytes(size)


def test_a_size_of_very_many_digits_is_still_a_size():
    assert parse_nbytes("9" * 400 + "g") > 10**400


@pytest.mark.parametrize(
    ("text", "share"), [("25%", 0.25), (" 100 % ", 1.0), ("0.5%", 0.005), ("2g", None), ("", None)]
)
def test_shares_are_percentages(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "x%", "nan%", "inf%", "5%%"])
def test_shares_outside_of_0_to_100_are_refused(text):
    with pytest.raises(ArgumentError):
        parse_share(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1000 * KIB, "1000 KiB"),
        (1023 * KIB, "1023 KiB"),
        (1023700, "1000 KiB"),  # not "1e+03"
        (MIB, "1 MiB"),
        (5 * GIB, "5 GiB"),
        (5000 * 1024 * GIB, "5000 TiB"),
    ],
)
def test_sizes_are_written_in_three_digits(nbytes, text):
    assert format_nbytes(nbytes) == text


@given(st.integers(1, 2**60))
def test_what_is_written_is_read_back_within_a_percent(nbytes):
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.01)


# -- measuring ---------------------------------------------------------------------------------------------------


class Machine:
    """A cgroup file system on disk, and the file that says which groups this process is in."""

    def __init__(self, directory: Path) -> None:
        self.cgroups, self.membership = directory / "cgroup", directory / "membership"
        self.cgroups.mkdir()

    def v2(self, group: str, limit: str | int, usage: int, stat: str = "", root: str = "") -> None:
        self._write(self.cgroups / root / group, {"memory.max": limit, "memory.current": usage, "memory.stat": stat})

    def v1(self, group: str, limit: int, usage: int, stat: str = "") -> None:
        files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
        self._write(self.cgroups / "memory" / group, files)

    def is_in(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def measure(self, **environ: str) -> Measurement:
        return measure(environ=environ, cgroups=self.cgroups, membership=self.membership)

    def _write(self, group: Path, files: dict[str, object]) -> None:
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 900 GiB, whose cgroups a test sets up."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * GIB))
    return Machine(tmp_path)


def test_without_cgroups_the_memory_of_the_machine_is_the_limit(machine):
    assert machine.measure().available == 900 * GIB


def test_a_v2_limit_counts_less_what_is_used(machine):
    machine.is_in("0::/job")
    machine.v2("job", 4 * GIB, usage=GIB)

    measured = machine.measure()

    assert measured.available == 3 * GIB
    assert measured.tightest.name == f"cgroup {machine.cgroups}/job"


def test_a_tighter_parent_is_the_limit(machine):
    machine.is_in("0::/slice/job/step")
    machine.v2("slice", 2 * GIB, usage=GIB // 2)
    machine.v2("slice/job", 8 * GIB, usage=0)
    machine.v2("slice/job/step", "max", usage=0)

    assert machine.measure().available == 3 * GIB // 2


def test_max_is_no_limit(machine):
    machine.is_in("0::/job")
    machine.v2("job", "max", usage=GIB)

    assert machine.measure().available == 900 * GIB


def test_v1_limits_count_on_the_whole_path(machine):
    machine.is_in("12:cpu,cpuacct:/elsewhere", "9:memory:/docker/abc", "1:name=systemd:/docker/abc")
    machine.v1("docker", 6 * GIB, usage=GIB)
    machine.v1("docker/abc", 7 * GIB, usage=GIB)

    assert machine.measure().available == 5 * GIB


def test_the_sentinel_of_v1_is_no_limit(machine):
    machine.is_in("9:memory:/job")
    machine.v1("job", 9223372036854771712, usage=GIB)

    assert machine.measure().available == 900 * GIB


def test_a_v2_tree_mounted_as_unified_beside_v1_counts(machine):
    machine.is_in("9:cpu:/", "0::/job")
    machine.v2("job", 3 * GIB, usage=0, root="unified")

    assert machine.measure().available == 3 * GIB


def test_in_a_container_the_limit_stands_at_the_root_of_what_is_mounted(machine):
    machine.is_in("9:memory:/docker/abc")
    machine.v1("", 2 * GIB, usage=0)  # the path of the host is not mounted here

    assert machine.measure().available == 2 * GIB


def test_a_path_that_leads_out_of_the_mount_stays_inside(machine):
    machine.is_in("0::/../../job")
    machine.v2("job", 2 * GIB, usage=0)
    machine._write(machine.cgroups.parent / "job", {"memory.max": 1, "memory.current": 0})

    assert machine.measure().available == 2 * GIB


def test_page_cache_that_nobody_used_lately_is_not_in_use(machine):
    machine.is_in("0::/job")
    machine.v2("job", 4 * GIB, 3 * GIB, stat=f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}")

    assert machine.measure().available == 2 * GIB


def test_the_same_holds_for_v1(machine):
    machine.is_in("9:memory:/job")
    machine.v1("job", 4 * GIB, 3 * GIB, stat=f"inactive_file 1\ntotal_inactive_file {GIB}")

    assert machine.measure().available == 2 * GIB


@pytest.mark.parametrize("cache", [0, 9 * GIB])
def test_a_group_beyond_its_limit_allows_nothing_more_and_credit_has_an_end(machine, cache):
    machine.is_in("0::/job")
    machine.v2("job", GIB, usage=2 * GIB, stat=f"inactive_file {cache}")

    assert machine.measure().available == (GIB if cache else 0)


@pytest.mark.parametrize("damage", ["memory.current", "memory.max", "memory.stat"])
def test_a_group_that_cannot_be_read_fully_is_no_error(machine, damage):
    machine.is_in("0::/job")
    machine.v2("job", GIB, usage=0)
    (machine.cgroups / "job" / damage).unlink()

    assert machine.measure().available in (GIB, 900 * GIB)


@pytest.mark.parametrize(("ranks", "share"), [("4", 4), ("1", 1), ("0", 1), ("", 1), ("-3", 1), ("many", 1)])
def test_local_ranks_share_what_there_is(machine, ranks, share):
    assert machine.measure(LOCAL_WORLD_SIZE=ranks).available == 900 * GIB // share


def test_the_free_space_of_a_mount_is_a_limit_where_segments_are_made_there(tmp_path):
    space = os.statvfs(tmp_path)

    limits = measure(mount=str(tmp_path)).limits

    (mount,) = [limit for limit in limits if limit.name == f"free space of {tmp_path}"]
    assert 0 <= mount.available <= space.f_blocks * space.f_frsize


def test_this_machine_can_be_measured():
    measured = measure()

    assert 0 < measured.available <= psutil.virtual_memory().total
    assert measured.tightest.name in str(measured)


# -- resolving ---------------------------------------------------------------------------------------------------


def having(nbytes: int) -> Measurement:
    return Measurement((Limit("test", nbytes),), 1)


def budget(wanted, *, needed: int = 1 << 50, prefetch: int = 1, available: int = 900 * GIB) -> Budget:
    return resolve(wanted, needed=needed, prefetch=prefetch, measured=having(available))


@given(st.integers(0, 2**45), st.integers(1, 7), st.integers(64 * KIB, 2**45))
def test_auto_is_a_power_of_two_within_three_limits(needed, prefetch, available):
    found = budget("auto", needed=needed, prefetch=prefetch, available=available)

    pages = max(-(-needed // PAGE_NBYTES), 1) * PAGE_NBYTES
    assert found.nbytes.bit_count() == 1
    assert found.nbytes <= min(MAX_AUTO, available // 2, 2 * pages * (prefetch + 1))
    # and no smaller than that asks for: the next power of two would be above one of the limits
    assert found.nbytes >= min(MAX_AUTO, available // 4 + 1, pages * (prefetch + 1))


@pytest.mark.parametrize(
    ("needed", "available", "nbytes", "reason"),
    [
        (1 << 50, 900 * GIB, GIB, "at most 1 GiB"),
        (1 << 50, 900 * MIB, 256 * MIB, "half of what may be used"),
        (5 * MIB, 900 * GIB, 16 * MIB, "what the data need"),
    ],
)
def test_auto_says_which_limit_it_was(needed, available, nbytes, reason):
    found = budget("auto", needed=needed, available=available)

    assert found.nbytes == nbytes
    assert reason in str(found)


def test_machines_with_memory_to_spare_all_get_the_same():
    assert len({budget("auto", available=n * GIB).partition_nbytes for n in (2, 3, 64, 900)}) == 1


def test_all_data_fit_into_one_partition_where_auto_follows_them():
    assert budget("auto", needed=5 * MIB, prefetch=2).partition_nbytes >= 5 * MIB


@pytest.mark.parametrize("wanted", ["auto", " AUTO "])
def test_auto_may_be_written_in_any_case(wanted):
    assert budget(wanted).nbytes == GIB


@pytest.mark.parametrize(
    ("wanted", "nbytes"), [("2g", 2 * GIB), (3 * MIB, 3 * MIB), ("25%", 2 * GIB), ("100%", 8 * GIB)]
)
def test_sizes_and_shares_are_taken_as_asked(wanted, nbytes):
    assert budget(wanted, available=8 * GIB).nbytes == nbytes


@given(st.integers(2, 2**40), st.integers(1, 9))
def test_all_partitions_together_stay_within_the_budget(nbytes, prefetch):
    if nbytes < PAGE_NBYTES * (prefetch + 1):
        with pytest.raises(BudgetError, match=f"ask for at least {PAGE_NBYTES * (prefetch + 1)}"):
            budget(nbytes, prefetch=prefetch, available=2**41)
        return

    found = budget(nbytes, prefetch=prefetch, available=2**41)

    assert found.partition_nbytes % PAGE_NBYTES == 0
    assert 0 < found.partition_nbytes * (prefetch + 1) <= found.nbytes == nbytes


def test_more_than_there_is_is_refused_with_both_figures():
    with pytest.raises(BudgetError, match=r"'8g' asks for 8 GiB but this process may use 4 GiB"):
        budget("8g", available=4 * GIB)


@pytest.mark.parametrize("wanted", ["auto", "50%"])
def test_where_there_is_no_memory_there_is_no_budget(wanted):
    with pytest.raises(BudgetError):
        budget(wanted, available=0)


@pytest.mark.parametrize("wanted", [0, "0", "0%", "lots", "", None, 1.5, -1])
def test_nonsense_is_the_callers_error(wanted):
    with pytest.raises(ArgumentError):
        budget(wanted)


def test_a_feed_says_what_was_measured_and_taken_and_why(path):
    with Feed(path, memory_budget="1m") as feed:
        said = str(feed.budget)

    assert "1 MiB for segments of 512 KiB: '1m' as asked" in said
    assert "available" in said


# -- sharing -----------------------------------------------------------------------------------------------------


def test_feeds_share_a_budget_in_equal_parts(path):
    shared = MemoryBudget("2m", feeds=2)

    with Feed(path, memory_budget=shared) as one, Feed(path, memory_budget=shared) as other:
        parts = [one.budget.nbytes, other.budget.nbytes]

    assert parts == [MIB, MIB]


def test_what_a_feed_gets_does_not_depend_on_which_others_are_open(path):
    shared = MemoryBudget("3m", feeds=3)

    with Feed(path, memory_budget=shared) as alone:
        assert alone.budget.nbytes == MIB


def test_one_feed_too_many_is_told_so(path):
    shared = MemoryBudget("2m", feeds=1)

    with Feed(path, memory_budget=shared):
        with pytest.raises(BudgetError, match=r"shared by 1 feeds, which are open already.*feeds=2"):
            Feed(path, memory_budget=shared).open()


def test_a_share_is_given_back_once_when_its_feed_is_closed(path):
    shared = MemoryBudget("2m", feeds=1)

    for _ in range(3):
        feed = Feed(path, memory_budget=shared).open()
        list(feed)
        feed.close()
        feed.close()

    with Feed(path, memory_budget=shared), pytest.raises(BudgetError):
        Feed(path, memory_budget=shared).open()


def test_a_share_is_given_back_while_somebody_keeps_frames(path):
    shared = MemoryBudget("2m", feeds=1)

    with Feed(path, memory_budget=shared) as feed:
        kept = [frame for _, _, frame in feed]

    with Feed(path, memory_budget=shared) as feed:
        assert len(list(feed)) == len(kept)


def test_a_share_is_given_back_when_its_feed_is_collected(path):
    shared = MemoryBudget("2m", feeds=1)
    feed = Feed(path, memory_budget=shared).open()
    next(iter(feed))

    del feed
    gc.collect()

    with Feed(path, memory_budget=shared) as feed:
        assert feed.budget.nbytes == 2 * MIB


def test_a_feed_that_fails_to_open_keeps_no_share(path, tmp_path):
    shared = MemoryBudget("2m", feeds=1)

    for bad in (tmp_path / "nowhere.h5", tmp_path):
        with contextlib.suppress(Exception):
            Feed(bad, memory_budget=shared).open()
    with pytest.raises(BudgetError):
        Feed(path, memory_budget=shared, prefetch=1000).open()

    Feed(path, memory_budget=shared).open().close()


def test_a_share_may_come_back_in_the_middle_of_taking_one():
    shared = MemoryBudget("2m", feeds=2)
    threshold = gc.get_threshold()

    class Holder:
        def __init__(self, share: Budget) -> None:
            self.itself, self.share = self, share

        def __del__(self) -> None:
            self.share.give_back()

    taken = 0
    gc.set_threshold(1)  # now every allocation collects: also those while a share is being taken
    try:
        for _ in range(200):
            with contextlib.suppress(BudgetError):
                Holder(budget(shared))
                taken += 1
    finally:
        gc.set_threshold(*threshold)
    gc.collect()

    assert taken > 2
    both = [budget(shared), budget(shared)]
    with pytest.raises(BudgetError):
        budget(shared)
    assert len(both) == 2


def test_a_pickled_budget_is_one_of_its_own():
    shared = MemoryBudget("25%", feeds=1)
    budget(shared)

    copy = pickle.loads(pickle.dumps(shared))

    assert (copy.size, copy.feeds) == ("25%", 1)
    assert budget(copy).nbytes == 225 * GIB


@pytest.mark.parametrize("feeds", [0, -1])
def test_a_budget_for_nobody_is_refused(feeds):
    with pytest.raises(ArgumentError, match="leaves the budget to nobody"):
        MemoryBudget("2g", feeds=feeds)
