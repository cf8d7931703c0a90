"""Print what this project needs, from pyproject.toml, as pip requirements.

`pip install .[cpu]` would also install the project; the set-up installs that
last, so that its needs are in place when it is built without isolation.

    python tools/list_needs.py            what the package itself needs
    python tools/list_needs.py cpu dev    and these extras
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def needs(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's requirements and those of the named extras, in the file's order."""
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise SystemExit(f"no such extra: {', '.join(unknown)} (there are: {', '.join(optional)})")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        print("\n".join(needs(Path(__file__).resolve().parents[1] / "pyproject.toml", sys.argv[1:])))
