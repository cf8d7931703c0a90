"""Starting, ending and watching worker processes; strangers on their sockets."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from fake_worker import MARK, SchedulerOutput, build_fake_worker, control_plane, is_running, rounds, wait_for
from vllm_handoff.executor import messages
from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.errors import WorkerStartError
from vllm_handoff.executor.folder import remove_abandoned
from vllm_handoff.executor.messages import Failure, Hello, Ready, Reply
from vllm_handoff.worker.control_link import ControlLink

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_raises_at_start_shows_its_traceback(rank: int, method: str) -> None:
    # The peer waits for it for ever, as in a rendezvous.
    with control_plane(start_now=False, method=method, start={rank: "raise", 1 - rank: "block"}) as plane:
        with pytest.raises(WorkerStartError) as caught:
            plane.start()
        assert f"start failed in start on rank {rank} (stage {rank}): ValueError: {MARK}" in str(caught.value)
        assert "in build_fake_worker" in str(caught.value)


@pytest.mark.parametrize(("how", "words"), [("sigkill", "killed by SIGKILL"), ("exit", "exited with code 3")])
def test_a_worker_that_dies_at_start_is_named(how: str, words: str) -> None:
    with control_plane(start_now=False, start={1: how, 0: "block"}) as plane:
        with pytest.raises(WorkerStartError, match=rf"rank 1 \(stage 1\) (was )?{words}"):
            plane.start()


def test_what_cannot_be_pickled_for_a_spawned_worker_fails_at_start() -> None:
    with control_plane(start_now=False, method="spawn", start=threading.Lock()) as plane:
        with pytest.raises(TypeError, match="pickle"):
            plane.start()


def test_an_interrupted_start_leaves_nothing() -> None:
    with control_plane(start_now=False, start={0: "block", 1: "block"}) as plane:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            plane.start()


def test_closing_twice_and_from_two_threads() -> None:
    with control_plane() as plane:
        pids = plane.pids
        threads = [threading.Thread(target=plane.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        plane.close()
        assert not any(map(is_running, pids))


def test_closing_from_the_failure_callback() -> None:
    closed = threading.Event()
    with control_plane() as plane:

        def close() -> None:
            plane.close()
            closed.set()

        plane.register_failure_callback(close)
        os.kill(plane.pids[0], signal.SIGKILL)
        assert closed.wait(30)


def test_workers_that_do_not_leave_are_killed() -> None:
    with control_plane() as plane:
        pids = plane.pids
        plane.call("block")
        plane.close(grace=0.2)
        assert not any(map(is_running, pids))


def test_children_of_workers_end_with_the_executor() -> None:
    with control_plane() as plane:
        children = plane.call("start_child").result()
    assert wait_for(lambda: not any(map(is_running, children.values())))


def test_workers_run_their_shutdown(tmp_path: Path) -> None:
    def leave_note(worker: object) -> None:
        worker.shutdown = lambda: (tmp_path / f"{os.getpid()}").touch()  # type: ignore[attr-defined]

    with control_plane() as plane:
        plane.call(leave_note).result()
        pids = plane.pids
    assert {path.name for path in tmp_path.iterdir()} == {str(pid) for pid in pids}


def test_the_folder_is_private_and_its_paths_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with control_plane() as plane:
        folder = Path(plane.folder.path)
        assert folder.parent == Path("/tmp")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert plane.call("add", (1,)).result() == {0: 1, 1: 2}
    assert not folder.exists()


def test_a_forked_copy_of_the_executor_ends_nothing() -> None:
    with control_plane() as plane:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                plane.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert plane.call("add", (1,)).result() == {0: 1, 1: 2}


ENGINE = """
import os, sys, time
sys.path.insert(0, {tests!r})
import tempfile; tempfile.tempdir = {folder!r}
from fake_worker import control_plane
with control_plane(method={method!r}) as plane:
    children = plane.call("start_child").result()
    if {stuck}:
        plane.call("block")
    print(*plane.pids, *children.values(), flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def engine(tmp_path: Path, method: str, stuck: bool) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A process with a control plane, and the ids of its workers and their children."""
    folder = tmp_path / "e"
    folder.mkdir()
    script = tmp_path / "engine.py"
    code = ENGINE.format(tests=str(Path(__file__).parent), folder=str(folder), method=method, stuck=stuck)
    indented = "".join(f"    {line}\n" for line in code.strip().splitlines())
    script.write_text(f"if __name__ == '__main__':\n{indented}")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            assert len(pids) == 4
            yield process, pids
        finally:
            process.kill()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("stuck", [False, True])
def test_workers_end_when_their_engine_is_killed(tmp_path: Path, method: str, stuck: bool) -> None:
    with engine(tmp_path, method, stuck) as (process, pids):
        process.kill()
        assert wait_for(lambda: not any(map(is_running, pids)))
        # Nobody else can remove it now.
        assert wait_for(lambda: not list((tmp_path / "e").iterdir()))


def test_an_exit_of_the_engine_ends_its_workers(tmp_path: Path) -> None:
    with engine(tmp_path, "fork", stuck=True) as (process, pids):
        # An exception unwinds the engine; the exit hooks do the rest.
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert wait_for(lambda: not any(map(is_running, pids)))
        assert not list((tmp_path / "e").iterdir())


def forget(method: str, connection: Connection) -> None:
    """An engine that starts a control plane and ends without closing it."""
    plane = ControlPlane(2, 1, build_fake_worker, lambda rank: {"rank": rank}, multiprocessing.get_context(method))
    plane.start()
    connection.send((plane.pids, plane.folder.path))
    plane.call("block")
    _kept.append(plane)


_kept: list[ControlPlane] = []


@pytest.mark.parametrize("engine_method", ["fork", "spawn"])
def test_a_control_plane_that_nobody_closes_ends_with_its_process(engine_method: str) -> None:
    context = multiprocessing.get_context(engine_method)
    ours, theirs = context.Pipe()
    # Not a daemon: it has children, as vLLM's engine process has.
    process = context.Process(target=forget, args=("fork", theirs))  # type: ignore[attr-defined]
    process.start()
    pids, folder = ours.recv()
    process.join(60)
    assert process.exitcode == 0
    assert wait_for(lambda: not any(map(is_running, pids)))
    assert not Path(folder).exists()
    process.close()
    ours.close()
    theirs.close()


def test_what_engines_that_were_killed_with_their_workers_left_is_removed(tmp_path: Path) -> None:
    with engine(tmp_path, "fork", stuck=False) as (process, pids):
        (folder,) = (tmp_path / "e").iterdir()
        remove_abandoned(folder.parent)
        assert (folder / "commands").exists()
        # As an out-of-memory killer or a container's end would: nobody gets to clean up.
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
        assert wait_for(lambda: not any(map(is_running, pids)))
        assert folder.exists()

        # The kernel lets go of a dead process's lock a moment later.
        def swept() -> bool:
            remove_abandoned(folder.parent)
            return not folder.exists()

        assert wait_for(swept)


def test_a_forked_worker_keeps_no_descriptor_of_its_engine() -> None:
    with control_plane() as plane:
        writer = f"pipe:[{os.fstat(plane._supervisor._life_writer.fileno()).st_ino}]"

        def writers(worker: object) -> int:
            found = 0
            for fd in Path("/proc/self/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    target = str(Path(f"/proc/self/fd/{fd.name}").readlink())
                    flags = int(fd.read_text().split("flags:")[1].split()[0], 8)
                    found += target == writer and flags & os.O_ACCMODE == os.O_WRONLY
            return found

        assert plane.call(writers).result() == {0: 0, 1: 0}


class Opened:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self._path,)


def test_strangers_are_ignored(tmp_path: Path) -> None:
    context = zmq.Context()
    bomb = pickle.dumps(Opened(tmp_path / "opened"))
    assert pickle.loads(bomb) is None and (tmp_path / "opened").exists()
    (tmp_path / "opened").unlink()
    with rounds() as (dispatcher, plane):
        wrong = messages.proof(b"?" * 32, "worker", 0, "reports")
        evil = messages.encode(Reply(0, len(bomb)))
        for link in ("commands", "reports"):
            for frames in (
                [b"", b"noise"],
                [messages.encode(Hello(0, "reports", wrong))],
                [messages.encode(Hello(9, "reports", wrong))],
                [messages.encode(Ready())],
                [messages.encode(Failure(True, "round 0", "x", "x", "x", 0))],
                [evil, bomb],
                [b"x" * 100_000],
            ):
                peer = context.socket(zmq.DEALER)
                peer.setsockopt(zmq.LINGER, 0)
                peer.connect(plane.folder.endpoint(link))  # type: ignore[arg-type]
                peer.send_multipart(frames)
                peer.send_multipart([evil, bomb])
            # One that does not even speak the socket's protocol.
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(f"{plane.folder.path}/{link}")
                raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        for number in range(20):
            dispatcher.execute_model(SchedulerOutput(note=number))
            assert dispatcher.sample_tokens(None).result()["note"] == number
        assert plane.failure is None
    context.destroy(linger=0)
    # A payload of somebody who has not proved himself is never opened.
    assert not (tmp_path / "opened").exists()


def test_a_malformed_report_of_a_proved_worker_ends_the_executor() -> None:
    def corrupt(worker: object, folder: str, token: bytes) -> None:
        link = ControlLink(1, folder, token)
        link.reports._socket.send(b"\xc1corrupt")
        link.close(linger_s=2)

    called = threading.Event()
    with control_plane() as plane:
        plane.register_failure_callback(called.set)
        future = plane.call(corrupt, (plane.folder.path, plane.folder.token))
        with contextlib.suppress(RuntimeError):
            future.result()
            plane.call("sleep", (600,)).result()
        assert called.wait(30)
        assert plane.failure is not None and "rank 1: A report's header" in plane.failure
