"""Build what is released, from the last commit, into dist/, and check it.

  1. wheel and sdist are built twice, in other folders and at other times, and must be
     equal byte by byte; so must a wheel built from the sdist
  2. every dependency's licence is known: dist/LICENCES.md
  3. the wheel is installed into a clean environment, which sees the packages of this one
     but not the checkout, and serves a tiny model from there (two stages, on the CPU)

Nothing is downloaded.

examples:
  python tools/check_release.py
  python tools/check_release.py --no-serve        a few seconds instead of a minute
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import licences
import models

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


class ReleaseError(RuntimeError):
    """What is wrong with the release."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def copy_source(commit: str, target: Path) -> None:
    """The files of a commit; what is not committed is not released."""
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(target, filter="data")


def build(what: str, source: Path, target: Path, date: int) -> Path:
    """Build a wheel or an sdist of `source` into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    # setuptools keeps the files' permissions, which are otherwise the umask's of whoever checked them out.
    for path in source.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    command = [sys.executable, "-c", _BUILD, what, str(target)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(date)}
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        raise ReleaseError(f"building the {what} failed:\n{done.stderr}")
    path = target / done.stdout.splitlines()[-1]
    if what == "sdist":
        normalise(path, date)
    return path


def normalise(sdist: Path, date: int) -> None:
    """Pack an sdist anew without what differs from build to build: times, owners, order.

    setuptools heeds SOURCE_DATE_EPOCH in wheels only.
    """
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            member.mtime = date
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=date) as zipped:
        zipped.write(packed.getvalue())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_reproducible(folder: Path) -> Path:
    """Build everything twice and from the sdist, put the result into dist/, and return the wheel there."""
    commit = git("rev-parse", "HEAD").decode().strip()
    # All files in a release are dated to its commit.
    date = int(git("log", "-1", "--format=%ct", commit))
    built: dict[str, list[Path]] = {"wheel": [], "sdist": []}
    for number in range(2):
        for what, paths in built.items():
            source = folder / f"{what}-source-{number}" / ("x" * number or "short")
            copy_source(commit, source)
            paths.append(build(what, source, folder / f"built-{number}", date))
    unpacked = folder / "unpacked"
    with tarfile.open(built["sdist"][0]) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    built["wheel"].append(build("wheel", source, folder / "built-from-sdist", date))
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for what, paths in built.items():
        if len({digest(path) for path in paths}) != 1:
            raise ReleaseError(f"builds of the {what} differ: {', '.join(f'{p} {digest(p)[:12]}' for p in paths)}")
        shutil.copy(paths[0], DIST)
        print(f"{what}: {paths[0].name}, {len(paths)} builds equal, sha256 {digest(paths[0])}")
    return DIST / built["wheel"][0].name


def check_licences() -> None:
    dists = licences.closure(["cpu"])
    text, unknown = licences.table(dists)
    (DIST / "LICENCES.md").write_text(text)
    if unknown:
        raise ReleaseError(f"no licence is known of {', '.join(unknown)}")
    print(f"licences: {len(dists)} dependencies, all known: dist/LICENCES.md")


def clean_environment(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel, and the packages of this one behind it; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # A folder in a .pth file is searched, but .pth files in it are not obeyed: the checkout stays out of sight.
    (Path(site.strip()) / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*command, "install", "--no-index", "--no-deps", "--ignore-installed", str(wheel)], check=True)
    return python


def check_clean_install(wheel: Path, folder: Path, serve: bool) -> None:
    python = clean_environment(wheel, folder / "clean")
    where = folder / "elsewhere"
    where.mkdir()
    ask = "import vllm_handoff.executor as e, vllm_handoff.worker as w; print(e.__file__, w.__file__)"
    for path in subprocess.check_output([python, "-c", ask], cwd=where, text=True).split():
        if not Path(path).is_relative_to(folder / "clean"):
            raise ReleaseError(f"the clean environment imports {path}")
    command = [str(python.with_name("vllm-handoff"))]
    subprocess.run([*command, "version"], cwd=where, check=True)
    if not serve:
        return
    model = models.get("tiny-llama", say=print)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    subprocess.run(
        [*command, "demo", "--model", str(model), "--port", str(port), "--max-tokens", "8"], cwd=where, check=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-serve", action="store_true", help="import from the clean environment, start no server")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-handoff-release-") as name:
            wheel = check_reproducible(Path(name))
            check_licences()
            check_clean_install(wheel, Path(name), serve=not args.no_serve)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("release: everything as it should be.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
