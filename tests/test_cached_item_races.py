"""`CachedItem` when much happens at once: computing for many, giving up, and switching meanwhile.

Races are held on a leash: functions wait for an event that the test sets once everybody else is where it wants them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import numpy as np
import pytest

from asyncfeed import CachedItem, CacheMissError, ClosedError, ModeError, UsageError
from asyncfeed.cache import journal as journal_module
from asyncfeed.cache import publish


async def entered(event: threading.Event) -> None:
    """Wait for another thread while the event loop goes on."""
    await anyio.to_thread.run_sync(event.wait, limiter=anyio.CapacityLimiter(1))


class Held:
    """An async function, and a plain one, that note who calls them and wait until they are released."""

    def __init__(self, value: Any = 1.0, error: BaseException | None = None) -> None:
        self.value, self.error = value, error
        self.calls: list[str] = []
        self.running = self.most = 0
        self._changed = threading.Condition()
        self._release, self._plain = anyio.Event(), threading.Event()
        self.entered = threading.Event()

    def release(self) -> None:
        self._release.set()
        self._plain.set()

    def hold_again(self) -> None:
        self._release, self._plain = anyio.Event(), threading.Event()
        self.entered = threading.Event()

    async def func(self, uid: str, *args: Any) -> Any:
        with self._called(uid):
            await self._release.wait()
        return self._outcome()

    def plain(self, uid: str, *args: Any) -> Any:
        with self._called(uid):
            assert self._plain.wait(20)
        return self._outcome()

    def of(self, kind: str) -> Callable[..., Any]:
        return self.func if kind == "async" else self.plain

    async def wait_running(self, num: int) -> None:
        """Wait until so many are at work."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self.running >= num, 20)

        await anyio.to_thread.run_sync(wait, limiter=anyio.CapacityLimiter(1))

    async def wait_entered(self) -> None:
        """Wait until the function is at work."""
        await entered(self.entered)

    @contextlib.contextmanager
    def _called(self, uid: str):
        with self._changed:
            self.calls.append(uid)
            self.running += 1
            self.most = max(self.most, self.running)
            self._changed.notify_all()
        self.entered.set()
        try:
            yield
        finally:
            with self._changed:
                self.running -= 1

    def _outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


KINDS = pytest.mark.parametrize("kind", ["async", "plain"])


async def outcome_of(function: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or raises."""
    try:
        return await function(*args)
    except Exception as error:  # noqa: BLE001 - an outcome like any other
        return error


class Tasks:
    """Calls in tasks of their own, and what became of them."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self.outcomes: dict[Any, Any] = {}
        self._scopes: dict[Any, anyio.CancelScope] = {}
        self._ended: dict[Any, anyio.Event] = {}

    def start(self, name: Any, function: Callable[..., Any], *args: Any) -> None:
        self._scopes[name], self._ended[name] = anyio.CancelScope(), anyio.Event()
        self._group.start_soon(self._run, name, function, *args)

    async def _run(self, name: Any, function: Callable[..., Any], *args: Any) -> None:
        with self._scopes[name] as scope:
            self.outcomes[name] = await outcome_of(function, *args)
        if scope.cancelled_caught:
            self.outcomes[name] = "cancelled"
        self._ended[name].set()

    async def end_of(self, name: Any) -> None:
        await self._ended[name].wait()

    def cancel(self, name: Any) -> None:
        self._scopes[name].cancel()


@contextlib.asynccontextmanager
async def tasks():
    async with anyio.create_task_group() as group:
        yield Tasks(group)


# -- once for all ----------------------------------------------------------------------------------------------------


@KINDS
def test_fifty_at_once_have_func_called_once_and_get_arrays_of_their_own(run, where, kind):
    async def main():
        held = Held(np.arange(5.0))
        mine = []

        async def change():
            value = await item.compute("x")
            mine.append(value.copy())
            value[:] = -1.0

        async with CachedItem(where, held.of(kind)) as item:
            async with tasks() as group:
                for i in range(50):
                    group.start(i, change)
                await anyio.wait_all_tasks_blocked()
                held.release()
            later = [await item.compute("x"), await item.get("x")]
        return held.calls, held.value, mine, later

    calls, value, mine, later = run(main)

    assert calls == ["x"]
    assert len(mine) == 50
    assert all(np.array_equal(each, np.arange(5.0)) for each in [*mine, *later, value])


@KINDS
def test_if_func_fails_all_see_the_error_and_the_next_call_tries_again(run, where, kind):
    async def main():
        held = Held(error=OSError("the GPU fell off"))
        async with CachedItem(where, held.of(kind)) as item:
            async with tasks() as group:
                for i in range(50):
                    group.start(i, item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                held.release()
            missing = await item.missing(["x"])
            held.error = None
            again = await item.compute("x")
        return group.outcomes, missing, again.item(), held.calls

    outcomes, missing, again, calls = run(main)

    assert len(outcomes) == 50
    assert all(repr(each) == "OSError('the GPU fell off')" for each in outcomes.values())
    assert (missing, again, calls) == (["x"], 1.0, ["x", "x"])


@KINDS
def test_one_that_gives_up_does_not_cancel_the_others(run, where, kind):
    async def main():
        held = Held()
        async with CachedItem(where, held.of(kind)) as item:
            async with tasks() as group:
                for i in range(3):
                    group.start(i, item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.cancel(0)  # the one that asked first
                await anyio.wait_all_tasks_blocked()
                held.release()
        return group.outcomes, held.calls

    outcomes, calls = run(main)

    assert outcomes == {0: "cancelled", 1: 1.0, 2: 1.0}
    assert calls == ["x"]


def test_when_all_give_up_an_async_func_is_cancelled_and_the_next_call_begins_anew(run, where):
    async def main():
        held = Held()
        async with CachedItem(where, held.func) as item:
            async with tasks() as group:
                group.start(0, item.compute, "x")
                group.start(1, item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.cancel(0)
                group.cancel(1)
                await anyio.wait_all_tasks_blocked()
                state = held.running, "x" in item
                held.release()
            return state, group.outcomes, (await item.compute("x")).item(), held.calls

    assert run(main) == ((0, False), {0: "cancelled", 1: "cancelled"}, 1.0, ["x", "x"])


@pytest.mark.parametrize("durability", ["process", "fsync"])
@pytest.mark.parametrize("value", [np.arange(3.0), [0.0, 1.0, 2.0]], ids=["array", "list"])
def test_when_all_give_up_what_a_plain_func_gives_is_kept_all_the_same(run, where, value, durability):
    async def main():
        held = Held(value)
        async with CachedItem(where, held.plain, durability=durability) as item:
            async with tasks() as group:
                group.start(0, item.compute, "x")
                await held.wait_entered()
                group.cancel(0)
            absent = "x" in item
            held.release()
            await item.to_reader()  # which waits for what is in flight
            return group.outcomes, absent, (await item.get("x")).tolist(), held.calls

    assert run(main) == ({0: "cancelled"}, False, [0.0, 1.0, 2.0], ["x"])


def test_one_that_gives_up_before_its_turn_is_never_computed(run, where):
    async def main():
        held = Held()
        async with CachedItem(where, held.func, concurrency=1) as item:
            async with tasks() as group:
                group.start("a", item.compute, "a")
                await anyio.wait_all_tasks_blocked()
                group.start("b", item.compute, "b")
                await anyio.wait_all_tasks_blocked()
                group.cancel("b")
                await anyio.wait_all_tasks_blocked()
                held.release()
        return group.outcomes, held.calls

    assert run(main) == ({"a": 1.0, "b": "cancelled"}, ["a"])


@KINDS
@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_functions_run_at_the_same_time_than_is_said(run, where, kind, concurrency):
    async def main():
        held = Held()
        async with CachedItem(where, held.of(kind), concurrency=concurrency) as item:
            async with tasks() as group:
                for i in range(8):
                    group.start(i, item.compute, f"u{i}")
                await held.wait_running(concurrency)
                await anyio.wait_all_tasks_blocked()
                running = held.running
                held.release()
            return running, held.most, len(held.calls), len(item)

    assert run(main) == (concurrency, concurrency, 8, 8)


def test_the_event_loop_goes_on_while_a_plain_func_runs(run, where):
    async def main():
        held = Held()
        turns = 0
        async with CachedItem(where, held.plain) as item:
            async with tasks() as group:
                group.start(0, item.compute, "x")
                await held.wait_entered()
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                    turns += 1
                during = held.running
                held.release()
        return turns, during, group.outcomes

    assert run(main) == (100, 1, {0: 1.0})


def test_functions_run_though_the_threads_of_the_event_loop_are_all_taken(run, where):
    async def main():
        release = threading.Event()
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = 2
        async with CachedItem(where, lambda uid: 1.0) as item:
            async with tasks() as group:
                for i in range(2):
                    group.start(i, anyio.to_thread.run_sync, release.wait)
                await anyio.wait_all_tasks_blocked()
                value = await item.compute("x")
                await item.to_reader()
                release.set()
        return value.item()

    assert run(main) == 1.0


# -- what functions may be -------------------------------------------------------------------------------------------


class Extractor:
    async def __call__(self, uid: str, scale: float = 1.0) -> np.ndarray:
        await anyio.lowlevel.checkpoint()
        return np.full(3, scale)

    async def method(self, uid: str, scale: float = 1.0) -> np.ndarray:
        return await self(uid, scale)

    def plain_method(self, uid: str, scale: float = 1.0) -> np.ndarray:
        return np.full(3, scale)


async def extract(uid: str, scale: float = 1.0) -> np.ndarray:
    return await Extractor()(uid, scale)


def extract_plainly(uid: str, scale: float = 1.0) -> np.ndarray:
    assert threading.current_thread() is not threading.main_thread()
    return np.full(3, scale)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        pytest.param(extract, (2.0,), id="async"),
        pytest.param(extract_plainly, (2.0,), id="plain"),
        pytest.param(functools.partial(extract, scale=2.0), (), id="partial of async"),
        pytest.param(functools.partial(extract_plainly, scale=2.0), (), id="partial of plain"),
        pytest.param(Extractor(), (2.0,), id="object with async __call__"),
        pytest.param(functools.partial(Extractor(), scale=2.0), (), id="partial of such an object"),
        pytest.param(Extractor().method, (2.0,), id="async method"),
        pytest.param(Extractor().plain_method, (2.0,), id="plain method"),
        pytest.param(lambda uid, scale: extract(uid, scale=scale), (2.0,), id="lambda that returns a coroutine"),
        pytest.param(lambda *args: np.full(3, args[-1]), (2.0,), id="lambda"),
    ],
)
def test_whatever_can_be_called_or_awaited_can_be_the_func(run, where, func, args):
    async def main():
        async with CachedItem(where, func) as item:
            return [await item.compute("x", *args), await item.compute("x", *args), await item("y", *args)]

    values = run(main)

    assert [value.tolist() for value in values] == [[2.0] * 3] * 3


SPEAKER: ContextVar[str] = ContextVar("speaker", default="nobody")


@KINDS
def test_func_sees_the_context_variables_of_whoever_asked_first(run, where, kind):
    async def func(uid):
        return len(SPEAKER.get())

    def plain(uid):
        return len(SPEAKER.get())

    async def main():
        async with CachedItem(where, func if kind == "async" else plain) as item:
            SPEAKER.set("somebody else")
            return (await item.compute("x")).item()

    assert run(main) == len("somebody else")


@KINDS
def test_a_func_that_raises_stop_iteration_is_an_error_and_no_hang(run, where, kind):
    def plain(uid):
        raise StopIteration

    async def func(uid):
        raise StopIteration

    async def main():
        async with CachedItem(where, plain if kind == "plain" else func) as item:
            return await outcome_of(item.compute, "x"), len(item)

    error, num = run(main)

    assert isinstance(error, RuntimeError)
    assert "StopIteration" in repr(error)
    assert num == 0


@KINDS
def test_ctrl_c_within_func_reaches_the_caller_and_the_item_is_computed_the_next_time(run, where, kind):
    """C3: what was interrupted is not taken for cached."""

    def plain(uid):
        raise KeyboardInterrupt

    async def func(uid):
        raise KeyboardInterrupt

    async def interrupted():
        async with CachedItem(where, plain if kind == "plain" else func) as item:
            await item.compute("before" if "before" in item else "x")

    async def main():
        async with CachedItem(where, lambda uid: 2.0) as item:
            return "x" in item, (await item.compute("x")).item()

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)

    assert run(main) == (False, 2.0)


def test_ctrl_c_within_the_writing_leaves_no_half_item(run, where, monkeypatch):
    """C3, the other half: the journal is as it was before."""
    real = journal_module.write_all

    def interrupted(fd, pieces, position):
        real(fd, pieces[:1], position)
        raise KeyboardInterrupt

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 1.0)
            with monkeypatch.context() as patch:
                patch.setattr(journal_module, "write_all", interrupted)
                await item.put("b", 2.0)

    async def after():
        async with CachedItem(where) as item:
            held = list(item)
            await item.put("b", 3.0)
            await item.to_reader()
            return held, item.recovered, [value.item() for value in await item.get_many(["a", "b"])]

    with pytest.raises(KeyboardInterrupt):
        run(main)

    assert run(after) == (["a"], None, [1.0, 3.0])


# -- switching meanwhile ---------------------------------------------------------------------------------------------


@KINDS
def test_a_switch_waits_for_what_is_being_computed_and_seals_it(run, where, kind):
    async def main():
        held = Held()
        async with CachedItem(where, held.of(kind)) as item:
            async with tasks() as group:
                group.start("compute", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start("switch", item.to_reader)
                await anyio.wait_all_tasks_blocked()
                mode = item.mode, "switch" in group.outcomes
                held.release()
            return mode, item.mode, group.outcomes, (await item.get("x")).item()

    mode, after, outcomes, value = run(main)

    assert (mode, after, value) == (("writer", False), "reader", 1.0)
    assert outcomes == {"compute": 1.0, "switch": None}


def test_calls_that_come_during_a_switch_wait_and_see_the_new_mode(run, where):
    async def main():
        held = Held()
        async with CachedItem(where, held.func) as item:
            await item.put("a", 5.0)
            async with tasks() as group:
                group.start("compute", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start("switch", item.to_reader)
                await anyio.wait_all_tasks_blocked()
                group.start("get", item.get, "x")
                group.start("get_many", item.get_many, ["a", "x"])
                group.start("put", item.put, "b", 2.0)
                group.start("late", item.compute, "late")
                group.start("missing", item.missing, ["a", "b"])
                await anyio.wait_all_tasks_blocked()
                waiting = list(group.outcomes)
                held.release()
            return waiting, group.outcomes

    waiting, outcomes = run(main)

    assert waiting == []
    assert outcomes["get"] == 1.0
    assert outcomes["get_many"] == [5.0, 1.0]
    assert outcomes["missing"] == ["b"]
    assert isinstance(outcomes["put"], ModeError)
    assert "reader mode" in str(outcomes["put"])
    assert isinstance(outcomes["late"], CacheMissError)
    assert "writer mode" in str(outcomes["late"])


@pytest.fixture
def slow_rename(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Sealing stops just before its file gets its name: events that say so, and let it go on."""
    reached, go_on = threading.Event(), threading.Event()
    real = publish.rename_exclusive

    def rename(*args: str) -> None:
        reached.set()
        assert go_on.wait(20)
        real(*args)

    monkeypatch.setattr(publish, "rename_exclusive", rename)
    return reached, go_on


def test_a_get_in_the_middle_of_sealing_waits_and_gets_its_item(run, where, slow_rename):
    """K4: it never sees a closed file."""
    reached, go_on = slow_rename

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 5.0)
            async with tasks() as group:
                group.start("switch", item.to_reader)
                await entered(reached)
                group.start("get", item.get, "a")
                await anyio.wait_all_tasks_blocked()
                waiting = list(group.outcomes)
                go_on.set()
            return waiting, group.outcomes, item.mode

    assert run(main) == ([], {"switch": None, "get": 5.0}, "reader")


def test_a_switch_that_is_cancelled_while_it_waits_leaves_the_mode_as_it_was(run, where):
    async def main():
        held = Held()
        async with CachedItem(where, held.func) as item:
            async with tasks() as group:
                group.start("compute", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start("switch", item.to_reader)
                await anyio.wait_all_tasks_blocked()
                group.start("put", item.put, "y", 2.0)
                await anyio.wait_all_tasks_blocked()
                group.cancel("switch")
                await group.end_of("put")
                mode = item.mode, dict(group.outcomes)
                held.release()
            return mode, sorted(item)

    assert run(main) == (("writer", {"switch": "cancelled", "put": None}), ["x", "y"])


def test_a_switch_that_is_cancelled_while_it_seals_is_carried_out_all_the_same(run, where, slow_rename):
    reached, go_on = slow_rename

    async def main():
        async with CachedItem(where) as item:
            await item.put("a", 5.0)
            async with tasks() as group:
                group.start("switch", item.to_reader)
                await entered(reached)
                group.cancel("switch")
                await anyio.wait_all_tasks_blocked()
                go_on.set()
            mode = item.mode
            await item.to_writer()
            await item.put("b", 6.0)
            return mode, sorted(item), (await item.get("a")).item()

    assert run(main) == ("reader", ["a", "b"], 5.0)


def test_two_switches_at_once_take_turns_and_the_second_says_which_mode_it_found(run, where):
    async def main():
        held = Held()
        async with CachedItem(where, held.func) as item:
            async with tasks() as group:
                group.start("compute", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start(1, item.to_reader)
                await anyio.wait_all_tasks_blocked()
                group.start(2, item.to_reader)
                await anyio.wait_all_tasks_blocked()
                held.release()
            return group.outcomes[1], group.outcomes[2], item.mode

    first, second, mode = run(main)

    assert (first, mode) == (None, "reader")
    assert isinstance(second, ModeError)
    assert "reader mode" in str(second)


@pytest.mark.parametrize("step", ["to_reader", "aclose"])
@KINDS
def test_a_switch_from_within_func_is_an_error_and_no_deadlock(run, where, kind, step):
    async def func(uid):
        await getattr(item, step)()

    def plain(uid):
        anyio.from_thread.run(getattr(item, step))

    item = CachedItem(where, func if kind == "async" else plain)

    async def main():
        async with item:
            return await outcome_of(item.compute, "x"), item.mode

    error, mode = run(main)

    assert isinstance(error, ModeError)
    assert "within compute()" in str(error)
    assert mode == "writer"


@KINDS
def test_calls_within_func_do_not_wait_for_a_switch_that_waits_for_func(run, where, kind):
    held = Held()

    async def use(uid):
        value = await item.get("base") + 1
        await item.put(f"{uid} by put", value)
        return await item.compute(f"{uid} by compute") + 1

    async def func(uid):
        if uid.endswith("by compute"):
            return 10.0
        await held.func(uid)
        return await use(uid)

    def plain(uid):
        if uid.endswith("by compute"):
            return 10.0
        held.plain(uid)
        return anyio.from_thread.run(use, uid)

    item = CachedItem(where, func if kind == "async" else plain, concurrency=1)

    async def main():
        async with item:
            await item.put("base", 1.0)
            async with tasks() as group:
                group.start("compute", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start("switch", item.to_reader)
                await anyio.wait_all_tasks_blocked()
                held.release()
            return group.outcomes, item.mode, {uid: value.item() async for uid, value in item}

    outcomes, mode, items = run(main)

    assert (outcomes, mode) == ({"compute": 11.0, "switch": None}, "reader")
    assert items == {"base": 1.0, "x by put": 2.0, "x by compute": 10.0, "x": 11.0}


def test_calls_within_func_do_not_wait_for_a_switch_though_the_one_who_asked_first_gave_up(run, where):
    async def main():
        held = Held()

        async def func(uid):
            await held.func(uid)
            return await item.get("base")

        async with CachedItem(where, func) as item:
            await item.put("base", 1.0)
            async with tasks() as group:
                group.start("first", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.start("second", item.compute, "x")
                await anyio.wait_all_tasks_blocked()
                group.cancel("first")
                group.start("switch", item.to_reader)
                await anyio.wait_all_tasks_blocked()
                held.release()
            return group.outcomes

    assert run(main) == {"first": "cancelled", "second": 1.0, "switch": None}


def test_a_task_that_func_left_behind_waits_for_a_switch_like_any_other(run, where, slow_rename):
    reached, go_on = slow_rename

    async def main():
        release = anyio.Event()

        async def later():
            await release.wait()
            group.outcomes["later"] = await outcome_of(item.put, "y", 1.0)

        async def func(uid):
            group._group.start_soon(later)
            return 1.0

        async with CachedItem(where, func) as item:
            async with tasks() as group:
                await item.compute("x")
                group.start("switch", item.to_reader)
                await entered(reached)
                release.set()
                await anyio.wait_all_tasks_blocked()
                waiting = list(group.outcomes)
                go_on.set()
            return waiting, group.outcomes["later"]

    waiting, error = run(main)

    assert waiting == []
    assert isinstance(error, ModeError)


@KINDS
def test_an_item_that_is_computed_from_itself_is_an_error_and_no_deadlock(run, where, kind):
    async def func(uid):
        return await item.compute(uid)

    def plain(uid):
        return anyio.from_thread.run(item.compute, uid)

    item = CachedItem(where, func if kind == "async" else plain)

    async def main():
        async with item:
            return await outcome_of(item.compute, "x")

    error = run(main)

    assert isinstance(error, UsageError)
    assert "'x' is computed from itself" in str(error)


def test_what_func_returns_may_be_used_by_it_again(run, where):
    memory = np.zeros(4)

    def func(uid):
        memory[:] = float(uid)
        return memory

    async def main():
        async with CachedItem(where, func, concurrency=1) as item:
            values = [await item.compute(str(i)) for i in range(3)]
            return [value[0] for value in values], [(await item.get(str(i)))[0] for i in range(3)]

    assert run(main) == ([0, 1, 2], [0, 1, 2])


# -- endings ---------------------------------------------------------------------------------------------------------


@KINDS
def test_leaving_by_an_error_cancels_what_is_computed_for_others(run, where, kind):
    async def main():
        held = Held()
        async with tasks() as group:

            async def use():
                async with CachedItem(where, held.of(kind)) as item:
                    group.start("other", item.compute, "x")
                    await held.wait_entered()
                    if kind == "plain":
                        group.start("release", released)
                    raise LookupError("mine")

            async def released():
                await anyio.wait_all_tasks_blocked()
                held.release()

            group.start("use", use)
        async with CachedItem(where) as item:
            return group.outcomes, list(item)

    outcomes, kept = run(main)

    assert repr(outcomes["use"]) == "LookupError('mine')"
    if kind == "async":
        assert isinstance(outcomes["other"], ClosedError)
        assert kept == []
    else:  # it cannot be stopped, and so is awaited and kept
        assert (outcomes["other"], kept) == (1.0, ["x"])


@pytest.mark.parametrize("during", ["compute", "switch", "opening"])
def test_cancelling_the_one_who_opened_it_closes_it_cleanly(run, where, monkeypatch, during, slow_rename):
    reached, go_on = slow_rename
    opened = threading.Event()
    if during == "opening":
        real = publish.lock_writer
        monkeypatch.setattr(
            "asyncfeed.cache.store.lock_writer", lambda *args: (opened.set(), go_on.wait(20), real(*args))[-1]
        )

    async def main():
        held = Held()
        item = CachedItem(where, held.func)

        async def use():
            async with item:
                await item.put("a", 5.0)
                await (item.to_reader() if during == "switch" else item.compute("x"))

        async with tasks() as group:
            group.start("use", use)
            await entered({"compute": held.entered, "switch": reached, "opening": opened}[during])
            group.cancel("use")
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        monkeypatch.undo()
        mode = item.mode
        async with item:
            return group.outcomes, mode, list(item)

    outcomes, mode, held = run(main)

    assert (outcomes, mode) == ({"use": "cancelled"}, "closed")
    assert held == ([] if during == "opening" else ["a"])


@pytest.mark.parametrize("during", ["compute", "switch", "put", "opening"])
def test_asyncios_own_cancellation_leaves_nothing_between_two_modes(where, monkeypatch, during, slow_rename):
    """It goes through every shield: ``task.cancel()``, ``asyncio.timeout`` and Ctrl-C."""
    reached, go_on = slow_rename
    other = threading.Event()
    if during == "opening":
        real = publish.lock_writer
        monkeypatch.setattr(
            "asyncfeed.cache.store.lock_writer", lambda *args: (other.set(), go_on.wait(20), real(*args))[-1]
        )
    elif during == "put":
        write = journal_module.write_all
        monkeypatch.setattr(
            journal_module,
            "write_all",
            lambda fd, pieces, position: (
                write(fd, pieces, position)
                if len(pieces) < 3 or other.is_set()
                else (other.set(), go_on.wait(20), write(fd, pieces, position))[-1]
            ),
        )

    async def main():
        held = Held()
        item = CachedItem(where, held.func)

        async def use():
            async with item:
                await item.put("a", 5.0)
                await (item.to_reader() if during == "switch" else item.compute("x"))

        task = asyncio.create_task(use())
        await entered({"compute": held.entered, "switch": reached}.get(during, other))
        for _ in range(3):
            task.cancel()
            await anyio.wait_all_tasks_blocked()
        go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        mode = task.cancelled(), item.mode
        async with item:
            return mode, list(item), (await item.verify()).ok

    mode, held, good = asyncio.run(asyncio.wait_for(main(), 5))

    assert mode == (True, "closed")
    assert held == ([] if during == "opening" else ["a"])
    assert good


def test_a_put_that_is_cancelled_has_let_go_of_the_array(run, where, monkeypatch):
    """Whoever gives up waiting uses the memory again."""
    write, reached, go_on = journal_module.write_all, threading.Event(), threading.Event()

    def slow(fd, pieces, position):
        reached.set()
        assert go_on.wait(20)
        return write(fd, pieces, position)

    monkeypatch.setattr(journal_module, "write_all", slow)

    async def main():
        array = np.zeros(1000)

        async def use():
            try:
                await item.put("a", array)
            finally:
                array[:] = 7

        async with CachedItem(where) as item:
            async with tasks() as group:
                group.start("use", use)
                await entered(reached)
                group.cancel("use")
                await anyio.wait_all_tasks_blocked()
                go_on.set()
            return (await item.verify()).ok, (await item.get("a")).sum()

    assert run(main) == (True, 0)


@KINDS
def test_an_event_loop_that_ends_with_work_in_flight_lets_go(run, where, kind):
    """L3: and the next one finds the cache as usable as ever."""
    held = Held()
    item = CachedItem(where, held.of(kind))

    async def leave():
        await item.__aenter__()
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:

            async def use():
                with scope:
                    await item.compute("x")

            group.start_soon(use)
            await held.wait_entered()
            held.release() if kind == "plain" else None
            scope.cancel()

    async def use():
        held.release()
        value = (await item.compute("y")).item()
        await item.to_reader()
        await item.aclose()
        return value

    run(leave)
    held.hold_again()

    assert run(use) == 1.0


def test_a_loop_that_is_closed_without_ceremony_leaves_a_cache_that_can_be_closed(where):
    held = Held()
    item = CachedItem(where, held.func)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(item.__aenter__())
    task = loop.create_task(item.compute("x"))
    loop.run_until_complete(held.wait_entered())
    loop.close()

    async def end():
        value = await outcome_of(item.put, "y", 1.0)
        await item.aclose()
        return value, item.mode

    after = asyncio.run(asyncio.wait_for(end(), 5))

    assert after == (None, "closed")
    assert not task.done()
    task._log_destroy_pending = False  # asyncio's own message about what the test has done
    _forget_tasks_of(loop)


def _forget_tasks_of(loop: Any) -> None:
    from asyncfeed.cache import flight

    for task in [task for task in flight._tasks if task.get_loop() is loop]:
        task._log_destroy_pending = False
        flight._tasks.discard(task)


def test_ctrl_c_in_the_middle_closes_the_cache(run, where):
    """A real one, while the loop waits for a function."""
    seen = {}

    async def main():
        held = Held()
        loop = anyio.lowlevel.current_token().native_token
        wake = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

        def press():
            held.entered.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
            wake(int)  # a loop that is about to sleep when the signal comes would sleep on

        thread = threading.Thread(target=press)
        thread.start()
        try:
            async with CachedItem(where, held.func) as item:
                seen["item"] = item
                await item.put("a", 1.0)
                await item.compute("x")
        finally:
            thread.join()

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:
        run(main)

    assert isinstance(caught.value, KeyboardInterrupt) or caught.group_contains(KeyboardInterrupt)
    assert seen["item"].mode == "closed"
