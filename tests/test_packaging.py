"""The package as others install it: everything in it, nothing outside its namespace."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]


def test_every_folder_with_code_is_listed() -> None:
    found = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", *PYPROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entry_points = file.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    modules = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == modules
    assert "vllm_handoff = vllm_handoff.executor.plugin:register" in entry_points
    assert "vllm-handoff = vllm_handoff.executor.cli:main" in entry_points


def test_exact_versions_lie_within_what_the_package_asks_for() -> None:
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    exact = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    project = PYPROJECT["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
        *project["optional-dependencies"]["dev"],
    ]
    for requirement in map(Requirement, asked):
        version = exact[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} but constraints.txt says {version}"
