"""A start without descriptors, disk or shared memory: a clear error, and nothing left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

RESOURCES = """
import json, multiprocessing, os, resource, sys, tempfile, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_worker import control_plane
tempfile.tempdir = {folder!r}
{limit}
started = time.monotonic()
try:
    with control_plane(method="fork") as plane:
        plane.call("add", (1,)).result()
    said = "it worked"
except Exception as error:
    said = f"{{type(error).__name__}}: {{error}}"
left = [len(multiprocessing.active_children()), os.listdir({folder!r})]
os.write(1, json.dumps([said, left]).encode())
"""


def without(tmp_path: Path, limit: str, *prefix: str) -> tuple[str, list]:
    """What the start of a control plane says in a process of its own under a limit, and what it leaves."""
    folder = tmp_path / "r"
    folder.mkdir()
    code = RESOURCES.format(tests=str(Path(__file__).parent), folder=str(folder), limit=limit)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.stdout, done.stderr[-3000:]
    said, left = json.loads(done.stdout)
    return said, left


def test_nothing_is_short(tmp_path: Path) -> None:
    assert without(tmp_path, "") == ("it worked", [0, []])


@pytest.mark.parametrize("most", range(5, 110, 7))
def test_no_descriptors_at_any_point_of_the_start(tmp_path: Path, most: int) -> None:
    said, left = without(tmp_path, f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))")
    assert said == "it worked" or "Too many open files" in said, said
    assert left == [0, []]


def test_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    # Files may have no bytes: what a full disk, or a quota, is to whoever extends a file.
    said, left = without(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert "start failed in start on rank" in said and "OSError: [Errno 27] File too large" in said, said
    assert left == [0, []]


CAN_MOUNT = subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_MOUNT, reason="this system lets nobody mount a file system of a few pages (unshare -Urm)")
def test_a_full_disk(tmp_path: Path) -> None:
    # A real one, with room for the lock file's entry and no page of data.
    script = f'cd {tmp_path} && mount -t tmpfs -o size=4k none r && head -c 4096 /dev/zero > r/.fill && exec "$@"'
    said, left = without(tmp_path, "", "unshare", "-Urm", "bash", "-c", script, "bash")
    assert "No space left on device" in said, said
    assert left == [0, [".fill"]]
