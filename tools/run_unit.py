"""Run vllm-handoff.service under a real systemd, on a machine that was started by something else.

Needs root and the CPU image's files, as `run_dockerfiles.py --folder` leaves them. systemd
is installed into a copy of them and started as the first process of namespaces of its own
(processes, mounts, network, control groups), all of which end with this program. The unit
is installed by deploy/systemd/install.sh and used as it is. Then, in some six minutes:

  start        it is "activating" until the first token, and active only then
  a worker is killed                    it is started again
  the engine is stopped (SIGSTOP)       "alive but not advancing", the watchdog, started again
  four failures                         it stays down
  stop while a request runs             the request is answered, the end is clean, nothing is left
  uninstall    the unit is gone

examples:
  sudo python tools/run_dockerfiles.py --folder /var/tmp/images
  sudo python tools/run_unit.py /var/tmp/images
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from run_dockerfiles import Image

UNIT = "vllm-handoff"
_SETTINGS = """\
MODEL=/var/lib/vllm-handoff/model
VLLM_OPTIONS=--pipeline-parallel-size 2 --host 127.0.0.1 --port 8000 --dtype float32 --enforce-eager \
--max-model-len 1024 --kv-cache-memory-bytes 67108864
HANDOFF_OPTIONS=--stall-after 5 --probe-after 2
OMP_NUM_THREADS=1
VLLM_WORKER_MULTIPROC_METHOD=fork
HF_HUB_OFFLINE=1
VLLM_NO_USAGE_STATS=1
DO_NOT_TRACK=1
"""
_START_S = 180
# A stall is told after 5 s and acted upon after WatchdogSec (60 s); RestartSec (15 s) follows.
_WATCHDOG_S = 150


class UnitError(RuntimeError):
    """The unit did not do what it should."""


class Machine:
    """A systemd as the first process of its own namespaces, in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        quoted = shlex.quote(str(root))
        script = f"""
            mount --bind {quoted} {quoted}
            mount -t proc proc {quoted}/proc && mount -t sysfs sysfs {quoted}/sys && mount --rbind /dev {quoted}/dev
            mount -t tmpfs tmpfs {quoted}/run && mount -t tmpfs tmpfs {quoted}/dev/shm
            mount -t cgroup2 cgroup2 {quoted}/sys/fs/cgroup && ip link set lo up
            exec chroot {quoted} /usr/bin/env -i container=chroot PATH=/usr/sbin:/usr/bin /lib/systemd/systemd --system
        """
        spaces = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "--cgroup"]
        self._outer = subprocess.Popen(["unshare", *spaces, "/bin/sh", "-ec", script])
        time.sleep(1)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        if not children:
            raise UnitError("systemd did not start")
        self._pid = children[0]

    def run(self, *command: str, check: bool = True) -> str:
        """What a command in there prints."""
        spaces = ["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        entered = ["nsenter", "--target", self._pid, *spaces, "chroot", str(self._root), *command]
        done = subprocess.run(entered, capture_output=True, text=True, timeout=180)
        if check and done.returncode:
            raise UnitError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def property(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, UNIT).strip()

    def processes(self) -> dict[str, list[int]]:
        """The unit's processes, by name."""
        found: dict[str, list[int]] = {}
        group = self.property("ControlGroup")
        pids = self.run("cat", f"/sys/fs/cgroup{group}/cgroup.procs", check=False).split() if group else []
        for pid in pids:
            line = self.run("cat", f"/proc/{pid}/cmdline", check=False).replace("\0", " ")
            found.setdefault(line.split(" ")[0] if line.startswith("VLLM") else "other", []).append(int(pid))
        return found

    def wait(self, what: str, true: Callable[[], bool], seconds: float) -> None:
        begin = time.monotonic()
        while not true():
            if time.monotonic() - begin > seconds:
                state = self.run("journalctl", "-u", UNIT, "-o", "cat", "--no-pager", "--lines=60", check=False)
                raise UnitError(f"not within {seconds:.0f} s: {what}\n{state}")
            time.sleep(0.3)
        print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)

    def end(self) -> None:
        self._outer.kill()
        self._outer.wait()


def prepare(images: Path, root: Path) -> None:
    """Fill a folder: the CPU image, and systemd."""
    source = images / "Dockerfile.cpu-last"
    subprocess.run(["cp", "-a", "--reflink=auto", f"{source}/.", str(root)], check=True)
    # Where the unit looks for the environment.
    (root / "opt/vllm-handoff/bin").symlink_to(".venv/bin")
    image = Image(root)
    image.run(["/bin/sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd dbus"])


def scenario(machine: Machine, root: Path) -> None:
    """The unit's life."""
    machine.run("bash", "/opt/vllm-handoff/deploy/systemd/install.sh", "install")
    (root / "etc/vllm-handoff/server.env").write_text(_SETTINGS)
    # The image's models can be read by its own user alone.
    machine.run("mkdir", "/var/lib/vllm-handoff")
    machine.run("cp", "-r", "/opt/vllm-handoff/.cache/models/tiny-llama", "/var/lib/vllm-handoff/model")
    machine.run("chown", "-R", "vllm-handoff:", "/var/lib/vllm-handoff")

    def active() -> bool:
        return machine.property("ActiveState") == "active"

    def restarted(times: int) -> Callable[[], bool]:
        return lambda: machine.property("NRestarts") == str(times) and active()

    machine.run("systemctl", "enable", UNIT)
    machine.run("systemctl", "start", "--no-block", UNIT)
    machine.wait("activating", lambda: machine.property("ActiveState") == "activating", 20)
    machine.wait("loading the model, not active yet", lambda: len(machine.processes()) > 1 and not active(), 60)
    machine.wait("active", active, _START_S)
    log = machine.run("journalctl", "-u", UNIT, "-o", "cat", "--no-pager")
    if not 0 < log.find("waiting for the first token") < log.find("ready: the first token was made"):
        raise UnitError(f"it was active before its first token:\n{log}")
    user = machine.run("stat", "-c", "%U", f"/proc/{machine.property('MainPID')}").strip()
    print(f"          as {user}, status: {machine.property('StatusText')}", flush=True)

    (worker, *_), (engine, *_) = (
        [pid for name, pids in machine.processes().items() if kind in name for pid in pids]
        for kind in ("Worker", "EngineCore")
    )
    machine.run("/bin/sh", "-c", f"kill -KILL {worker}")
    machine.wait("a worker was killed: failed, and started again", restarted(1), _START_S)

    (engine,) = (pid for name, pids in machine.processes().items() if "EngineCore" in name for pid in pids)
    machine.run("/bin/sh", "-c", f"kill -STOP {engine}")
    machine.wait(
        "the engine was stopped: said in the status", lambda: "not advancing" in machine.property("StatusText"), 60
    )
    machine.wait("the watchdog ended it, and it was started again", restarted(2), _WATCHDOG_S)
    if "watchdog" not in machine.run("journalctl", "-u", UNIT, "--no-pager").lower():
        raise UnitError("it was not the watchdog that ended it")

    for _ in range(2):
        machine.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", UNIT)
        machine.wait("its main process was killed", lambda: not active(), 30)
        machine.wait(
            "and it came back, or stays down", lambda: machine.property("ActiveState") in ("active", "failed"), 180
        )
    machine.wait("four failures in ten minutes: it stays down", lambda: machine.property("ActiveState") == "failed", 60)
    time.sleep(20)
    if machine.property("ActiveState") != "failed":
        raise UnitError("it did not stay down")

    machine.run("systemctl", "reset-failed", UNIT)
    machine.run("systemctl", "start", UNIT)
    answers: list[str] = []
    body = {"model": "/var/lib/vllm-handoff/model", "prompt": [1], "max_tokens": 900, "ignore_eos": True}
    ask = (
        "import json, urllib.request as u; r = u.Request('http://127.0.0.1:8000/v1/completions', "
        f"{json.dumps(body).encode()!r}, {{'Content-Type': 'application/json'}}); "
        "print(json.load(u.urlopen(r))['usage']['completion_tokens'])"
    )
    client = threading.Thread(target=lambda: answers.append(machine.run("/usr/bin/python3", "-c", ask, check=False)))
    client.start()
    time.sleep(1)
    begin = time.monotonic()
    machine.run("systemctl", "stop", UNIT)
    took = time.monotonic() - begin
    client.join()
    if [answer.strip() for answer in answers] != ["900"] or machine.property("Result") != "success":
        raise UnitError(f"the running request got {answers}, the result is {machine.property('Result')}")
    if left := machine.processes():
        raise UnitError(f"left behind: {left}")
    print(f"{took:6.1f} s  stopped: the running request got its 900 tokens, nothing is left", flush=True)

    machine.run("bash", "/opt/vllm-handoff/deploy/systemd/install.sh", "uninstall")
    if machine.property("LoadState") != "not-found":
        raise UnitError("the unit is still there")
    print("          uninstalled", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="the folder that run_dockerfiles.py has made")
    args = parser.parse_args()
    if os.geteuid() or not shutil.which("nsenter"):
        print("error: this needs root and util-linux.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vllm-handoff-unit-", dir="/var/tmp") as name:
        root = Path(name)
        root.chmod(0o755)
        machine = None
        try:
            prepare(args.images, root)
            machine = Machine(root)
            version = machine.run("systemctl", "--version").split("\n")[0]
            machine.wait(
                f"{version} is up", lambda: _is_up(machine.run("systemctl", "is-system-running", check=False)), 30
            )
            scenario(machine, root)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if machine is not None:
                machine.end()
    print("The unit does what it should.")
    return 0


def _is_up(state: str) -> bool:
    # Degraded: units of the copied system that want hardware.
    return bool(re.match(r"running|degraded", state))


if __name__ == "__main__":
    sys.exit(main())
