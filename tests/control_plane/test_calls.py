"""Calls to every worker: order, results, errors, timeouts, threads."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest

from fake_worker import MARK, STAGES, FakeWorker, control_plane
from vllm_handoff.executor.errors import ExecutorFailedError, WorkerCallError

pytestmark = pytest.mark.timeout(120)


def twice(worker: FakeWorker, value: int) -> int:
    return 2 * value + worker.rank


def test_by_name_callable_and_closure() -> None:
    offset = 100
    with control_plane() as plane:
        assert plane.call("add", (1,), {"b": 2}).result() == {0: 3, 1: 4}
        assert plane.call(twice, (4,)).result() == {0: 8, 1: 9}
        assert plane.call(lambda worker, value: worker.rank + value + offset, (1,)).result() == {0: 101, 1: 102}
        # A function as an argument, as apply_model has it.
        assert plane.call(lambda worker, f: f(worker.rank), (lambda rank: rank + offset,)).result() == {0: 100, 1: 101}


def test_a_spawned_worker_is_the_same() -> None:
    with control_plane(method="spawn") as plane:
        assert plane.call("add", (1,)).result() == {0: 1, 1: 2}


def test_all_workers_see_one_stream_in_order() -> None:
    with control_plane() as plane:
        threads = [
            threading.Thread(target=lambda n=n: [plane.call("add", (n, i)) for i in range(50)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logs = plane.call("get_log").result()
        assert logs[0] == logs[1]
        assert len(logs[0]) == 200
        for n in range(4):
            assert [entry[2] for entry in logs[0] if entry[1] == n] == list(range(50))


def test_awaited_out_of_order_and_from_several_threads() -> None:
    with control_plane() as plane:
        futures = [plane.call("add", (i,)) for i in range(40)]
        assert [f.result()[0] for f in reversed(futures)] == list(reversed(range(40)))
        futures = [plane.call("add", (i,)) for i in range(40)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda f: f.result()[1], reversed(futures)))
        assert results == [i + 1 for i in reversed(range(40))]


def test_a_waiting_thread_is_not_held_by_a_longer_wait() -> None:
    with control_plane() as plane:
        quick = plane.call("add", (1,))
        slow = plane.call("sleep", (1.0,))
        waiter = threading.Thread(target=slow.result)
        waiter.start()
        assert quick.result() == {0: 1, 1: 2}
        after = plane.call("add", (2,))
        waiter.join()
        assert after.result() == {0: 2, 1: 3}


def test_one_rank_replies() -> None:
    with control_plane() as plane:
        assert plane.call("add", (1,), reply_rank=1).result() == {1: 2}


def test_done_and_callbacks_need_no_wait() -> None:
    with control_plane() as plane:
        future = plane.call("add", (1,))
        while not future.done():
            pass
        called = threading.Event()
        plane.call("add", (2,)).add_done_callback(lambda f: called.set())
        assert called.wait(30)
        # The background thread has the receiving role now; waiting still works.
        assert plane.call("add", (3,)).result() == {0: 3, 1: 4}


def test_a_failing_call_fails_alone() -> None:
    with control_plane() as plane:
        good, bad, after = plane.call("add", (1,)), plane.call("fail_on", (0,)), plane.call("add", (2,))
        with pytest.raises(WorkerCallError, match=r"call 'fail_on' failed on rank 0 \(stage 0\)") as caught:
            bad.result()
        assert MARK in str(caught.value) and "Traceback" in str(caught.value) and "in fail_on" in str(caught.value)
        assert good.result() == {0: 1, 1: 2}
        assert after.result() == {0: 2, 1: 3}


def test_a_failure_on_a_rank_that_does_not_reply_is_seen() -> None:
    with control_plane() as plane:
        future = plane.call(lambda worker: worker.fail_on(0) if worker.rank == 0 else worker.sleep(1), reply_rank=1)
        with pytest.raises(WorkerCallError, match="rank 0"):
            future.result()


@pytest.mark.parametrize(
    ("method", "match"),
    [("no_such_method", "no attribute 'no_such_method'"), ("unpicklable", "pickle"), ("add", "missing 1 required")],
)
def test_bad_calls_fail_alone(method: str, match: str) -> None:
    with control_plane() as plane:
        with pytest.raises(WorkerCallError, match=match):
            plane.call(method).result()
        assert plane.call("add", (1,)).result() == {0: 1, 1: 2}


def test_timeouts_name_who_did_not_reply() -> None:
    with control_plane() as plane:
        future = plane.call(lambda worker: worker.sleep(1 + worker.rank * 2) if worker.rank else 0, timeout=0.2)
        with pytest.raises(TimeoutError, match=r"no reply from rank 1 \(stage 1\) within 0.2 s"):
            future.result()
        # The late reply belongs to nobody.
        assert plane.call("add", (1,)).result() == {0: 1, 1: 2}


def test_a_wait_that_times_out_can_be_repeated() -> None:
    with control_plane() as plane:
        future = plane.call("sleep", (1.0,))
        with pytest.raises(TimeoutError):
            future.result(0.01)
        assert future.result(60) == {0: 0, 1: 1}
        assert future.result(0) == {0: 0, 1: 1}


def test_large_payloads_both_ways() -> None:
    blob = bytes(range(256)) * 40_000
    with control_plane() as plane:
        results: dict[int, Any] = plane.call(lambda worker, data: data[::-1], (blob,)).result()
        assert len(results) == STAGES and all(result == blob[::-1] for result in results.values())


def test_calls_after_the_end_are_refused() -> None:
    with control_plane() as plane:
        pending = plane.call("sleep", (0.5,))
    with pytest.raises(ExecutorFailedError, match="shut down"):
        pending.result()
    with pytest.raises(ExecutorFailedError, match="shut down"):
        plane.call("add", (1,))
