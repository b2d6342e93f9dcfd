"""Which epoch is next, as the processes of a data loader agree on it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal

from asyncfeed.epochs import Epochs, Party

MAIN = os.getpid()
FORK = multiprocessing.get_context("fork")


def both(key: int) -> list[Party]:
    return [Party((key,), worker) for worker in (0, 1)]


def in_child(function, *args):
    """What a function returns in a forked child."""
    receive, send = FORK.Pipe(duplex=False)
    child = FORK.Process(target=lambda: send.send(function(*args)))
    child.start()
    child.join(30)
    with receive, send:
        assert receive.poll(0), "the child failed"
        return receive.recv()


def test_an_iteration_without_workers_takes_the_next_epoch():
    epochs = Epochs(3)

    assert [epochs.begin(MAIN).epoch for _ in range(3)] == [3, 4, 5]


def test_the_workers_of_one_iteration_take_the_same_epoch():
    epochs = Epochs()

    taken = [[epochs.begin(MAIN, party).epoch for party in both(key)] for key in (17, 4, 99)]

    assert taken == [[0, 0], [1, 1], [2, 2]]


def test_a_key_that_comes_again_is_another_iteration():
    epochs = Epochs()

    taken = [epochs.begin(MAIN, party).epoch for _ in range(3) for party in both(1)]

    assert taken == [0, 0, 1, 1, 2, 2]


def test_a_worker_that_comes_late_belongs_to_the_iteration_that_it_was_started_for():
    epochs = Epochs()
    (early, late), following = both(1), both(2)

    taken = [epochs.begin(MAIN, party).epoch for party in (early, following[0], late, following[1])]

    assert taken == [0, 1, 0, 1]
    assert epochs.next(MAIN).epoch == 2


def test_a_state_is_gone_on_with_by_one_iteration_in_all_its_workers():
    epochs = Epochs()
    epochs.set(MAIN, 5, {"items": 3})

    taken = [tuple(epochs.begin(MAIN, party)) for key in (1, 2) for party in both(key)]

    assert taken == [(5, {"items": 3})] * 2 + [(6, None)] * 2


def test_a_shorter_record_leaves_nothing_of_a_longer_one():
    epochs = Epochs()
    epochs.set(MAIN, 5, {"items": "x" * 1000})
    epochs.set(MAIN, 6)

    assert epochs.next(MAIN) == (6, None)
    assert json.loads(os.pread(epochs._fd, 10_000, 0)) == {str(MAIN): {"epoch": 6, "state": None, "begun": []}}


def test_children_see_what_the_parent_chose_and_the_parent_what_they_began():
    epochs = Epochs()
    epochs.set(MAIN, 7)

    taken = [in_child(epochs.begin, MAIN, party).epoch for party in both(1)]

    assert taken == [7, 7]
    assert epochs.next(MAIN).epoch == 8


def test_ranks_that_are_forked_from_one_process_count_for_themselves():
    epochs = Epochs()
    epochs.set(MAIN, 4)

    taken = [in_child(lambda: [epochs.begin(os.getpid()).epoch for _ in range(2)]) for _ in range(2)]

    assert taken == [[4, 5]] * 2
    assert epochs.next(MAIN).epoch == 4


def test_a_pickle_goes_on_from_the_next_epoch_by_itself():
    epochs = Epochs()
    epochs.set(MAIN, 3, {"items": 1})

    copy = pickle.loads(pickle.dumps(epochs))

    assert [tuple(copy.begin(MAIN)), tuple(copy.begin(MAIN))] == [(3, {"items": 1}), (4, None)]
    assert epochs.next(MAIN).epoch == 3


def test_whoever_dies_with_the_lock_leaves_it_to_the_others():
    epochs = Epochs(2)

    def die_inside() -> None:
        with epochs._record(MAIN) as record:
            record["epoch"] = 50
            os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=die_inside)
    child.start()
    child.join(30)

    assert child.exitcode == -signal.SIGKILL
    assert epochs.begin(MAIN).epoch == 2


def test_workers_that_come_all_at_once_agree():
    epochs = Epochs(1)
    gate, opened = os.pipe()
    receive, send = FORK.Pipe(duplex=False)

    def work(worker: int) -> None:
        os.close(opened)
        os.read(gate, 1)  # returns when nobody can write any longer
        send.send((worker, epochs.begin(MAIN, Party((1,), worker)).epoch))

    children = [FORK.Process(target=work, args=(worker,)) for worker in range(8)]
    for child in children:
        child.start()
    os.close(opened)
    for child in children:
        child.join(30)

    with receive, send:
        assert sorted(receive.recv() for _ in children) == [(worker, 1) for worker in range(8)]
    os.close(gate)
    assert epochs.next(MAIN).epoch == 2
