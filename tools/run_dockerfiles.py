"""Run every step of the Dockerfiles without a container engine: on a bare Debian, in a changed root.

Needs root, debootstrap and the network; takes some minutes and about 8 GB. What an
engine would do is done by hand: COPY, ENV, WORKDIR and USER as they are written, each
RUN in the stage's own folder. Then the CPU image's command runs as its user, with no
network but a loopback, until its health check has made a token and the command has ended.

Base images are stood in for, since none can be had without a registry:
  python:3.*-slim-bookworm   Debian bookworm with Debian's own Python 3.11
  vllm/vllm-openai           the CPU image just made, with its vLLM and uv in the system's Python

examples:
  sudo python tools/run_dockerfiles.py
  sudo python tools/run_dockerfiles.py --folder /var/tmp/images      keep what is made
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "deploy" / "docker"
# With what this machine needs to reach the network.
_FROM_HERE = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
_PROBE_EVERY_S = 3
_COMMAND_S = 600


class StepError(RuntimeError):
    """A step of a Dockerfile that does not work."""


@dataclass
class Image:
    """A stage: its files and what its instructions have set."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: dict(_ENV))
    workdir: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)

    def start(self, command: list[str], network: bool = True, **options: object) -> subprocess.Popen:
        """Start a command in the image, in namespaces of its own: they end with it, mounts and all."""
        uid, _, gid = self.user.partition(":")
        root = shlex.quote(str(self.folder))
        inside = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(command)}"
        # As an engine does: the home of the user that runs.
        home = f"$(getent passwd {uid} | cut -d: -f6)" if uid != "0" else "/root"
        script = (
            f"mount -t proc proc {root}/proc && mount -t sysfs -o ro sysfs {root}/sys && "
            + f"mount --rbind /dev {root}/dev && mount -t tmpfs tmpfs {root}/dev/shm && "
            + ("" if network else "ip link set lo up && ")
            + f"exec chroot --userspec={uid}:{gid or uid} {root} /usr/bin/env -i {_assignments(self.env)} "
            + f"/bin/sh -c {shlex.quote(f'export HOME={home}; {inside}')}"
        )
        spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        return subprocess.Popen(["unshare", *spaces, "/bin/sh", "-c", script], **options)  # type: ignore[call-overload]

    def run(self, command: list[str]) -> None:
        if status := self.start(command).wait():
            raise StepError(f"ended with status {status}: {shlex.join(command)}")


def _assignments(env: dict[str, str]) -> str:
    return " ".join(shlex.quote(f"{name}={value}") for name, value in env.items())


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, the rest) of each instruction, comments and line ends taken out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


class Builder:
    """Makes images from Dockerfiles, one folder a stage.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bases: dict[str, Path] = {}

    def base(self, name: str) -> Path:
        """The folder that stands in for a base image."""
        kind = name.partition(":")[0]
        if kind not in self._bases:
            if kind != "python":
                raise StepError(f"there is nothing to stand in for the base image {name}")
            folder = self._folder / "debian"
            packages = "--include=ca-certificates,python3,python3-venv,python3-pip"
            subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", str(folder)], check=True)
            for path in map(Path, _FROM_HERE):
                if path.is_file():
                    shutil.copy(path, folder / str(path)[1:])
            for python in ("python", "python3"):
                (folder / "usr/local/bin" / python).symlink_to("/usr/bin/python3.11")
            # The image's Python is nobody's package.
            (folder / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
            self._bases[kind] = folder
        return self._bases[kind]

    def stand_in(self, name: str, image: Image) -> None:
        """From now on a base image of this name is this image, its vLLM and uv in the system's Python."""
        folder = self._copy(image.folder, name.replace("/", "-"))
        base = Image(folder)
        base.run(["/usr/bin/python3", "-m", "pip", "install", "--quiet", "uv"])
        site = "/opt/vllm-handoff/.venv/lib/python3.11/site-packages"
        (folder / "usr/local/lib/python3.11/dist-packages/vllm.pth").write_text(f"{site}\n")
        # The editable install of the CPU image must not hide the wheel; the base has no such user either.
        for path in (folder / site[1:]).glob("*vllm_handoff*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        base.run(["userdel", "--remove", "handoff"])
        self._bases[name] = folder

    def _copy(self, source: Path, name: str) -> Path:
        target = self._folder / name
        subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(target)], check=True)
        return target

    def build(self, dockerfile: Path) -> Image:
        """Carry out a Dockerfile; the last stage."""
        stages: dict[str, Image] = {}
        arguments: dict[str, str] = {}
        image: Image | None = None
        for word, rest in instructions(dockerfile.read_text()):
            print(f"{dockerfile.name}: {word} {rest}", flush=True)
            known = {**arguments, **(image.env if image else {})}
            if word == "ARG":
                name, _, value = rest.partition("=")
                arguments[name] = value
            elif word == "FROM":
                base, *named = string.Template(rest).substitute(arguments).split()
                name = named[-1] if named else "last"
                image = stages[name] = Image(self._copy(self.base(base), f"{dockerfile.name}-{name}"))
            elif image is None:
                raise StepError(f"{word} before FROM")
            elif word == "ENV":
                for assignment in shlex.split(rest):
                    name, _, value = assignment.partition("=")
                    image.env[name] = string.Template(value).safe_substitute(known)
            elif word == "WORKDIR":
                image.workdir = rest
                (image.folder / rest[1:]).mkdir(parents=True, exist_ok=True)
            elif word == "USER":
                image.user = rest
            elif word == "COPY":
                self._copy_into(image, rest, stages)
            elif word == "RUN":
                image.run(["/bin/sh", "-c", rest])
            elif word == "CMD":
                image.command = json.loads(rest)
            elif word == "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            elif word == "HEALTHCHECK":
                image.probe = json.loads(rest.partition("CMD ")[2])
            elif word != "EXPOSE":
                raise StepError(f"{word} is not known here")
        assert image is not None
        return image

    def _copy_into(self, image: Image, rest: str, stages: dict[str, Image]) -> None:
        parts = rest.split()
        options = dict(part[2:].split("=") for part in parts if part.startswith("--"))
        source, target = (part for part in parts if not part.startswith("--"))
        into = image.folder / (target if target.startswith("/") else f"{image.workdir}/{target}")[1:]
        into.mkdir(parents=True, exist_ok=True)
        if "from" in options:
            subprocess.run(["cp", "-a", f"{stages[options['from']].folder}{source}/.", str(into)], check=True)
        else:
            # Roughly what .dockerignore leaves: what git has, or would take.
            files = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT)
            packed = subprocess.Popen(
                ["tar", "--null", "--files-from=-", "-c"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            unpacked = subprocess.Popen(["tar", "-x", "--no-same-owner", "-C", str(into)], stdin=packed.stdout)
            assert packed.stdin is not None
            packed.stdin.write(files)
            packed.stdin.close()
            if packed.wait() or unpacked.wait():
                raise StepError("the project could not be copied")
        if "chown" in options:
            subprocess.run(["chown", "-R", options["chown"], str(into)], check=True)


def run_with_probe(image: Image) -> None:
    """Run an image's command as its user until it ends; its health check must succeed meanwhile."""
    # The check joins the command's network, as an engine's does.
    script = (
        f"{shlex.join(image.command)} & command=$!; "
        f"until {shlex.join(image.probe)} 2>/dev/null; do kill -0 $command || exit 9; sleep {_PROBE_EVERY_S}; done; "
        "echo healthy; wait $command"
    )
    running = image.start(["/bin/sh", "-c", script], network=False)
    try:
        status = running.wait(_COMMAND_S)
    finally:
        running.kill()
    if status:
        raise StepError(f"{shlex.join(image.command)} with its health check ended with status {status}")


def check(folder: Path) -> None:
    builder = Builder(folder)
    start = time.monotonic()
    cpu = builder.build(DOCKER / "Dockerfile.cpu")
    run_with_probe(cpu)
    builder.stand_in("vllm/vllm-openai", cpu)
    gpu = builder.build(DOCKER / "Dockerfile")
    # Without a GPU its server cannot start; what the entry point says, and as whom, can be seen.
    gpu.run([*gpu.entrypoint[:2], "--help"])
    gpu.run(["/bin/sh", "-c", "test $(id -u) = 10001 && touch /models/written $HOME/written"])
    if gpu.start(gpu.probe).wait() != 1:
        raise StepError("the health check does not fail without a server")
    print(f"Every step of both Dockerfiles worked, in {time.monotonic() - start:.0f} s.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="make the images there and keep them (default: a temporary folder)")
    args = parser.parse_args()
    if os.geteuid() or not shutil.which("debootstrap"):
        print("error: this needs root and debootstrap (on Debian: sudo apt install debootstrap).", file=sys.stderr)
        return 1
    try:
        if args.folder is not None:
            args.folder.mkdir(parents=True)
            check(args.folder)
        else:
            with tempfile.TemporaryDirectory(prefix="vllm-handoff-images-", dir="/var/tmp") as name:
                check(Path(name))
    except (OSError, StepError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
