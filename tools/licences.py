"""The licence of everything that the package depends on, as installed here, as a table in Markdown.

examples:
  python tools/licences.py                    what the package itself asks for, and what that asks for
  python tools/licences.py --extra cpu        with everything that vLLM needs on a CPU
  python tools/licences.py --page             both, as the page docs/licences.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

ROOT_PACKAGE = "vllm-handoff"
_LONGEST = 60
_CLASSIFIER = "License :: "


def closure(extras: Iterable[str]) -> list[Distribution]:
    """The distributions that the package needs with these extras, by name; the package itself is not among them."""
    found: dict[str, Distribution] = {}
    waiting = [(ROOT_PACKAGE, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform, or optional
        if name != ROOT_PACKAGE:
            found[_normal(name)] = dist
        for line in dist.requires or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in (wanted or {""})]
            if requirement.marker is None or any(requirement.marker.evaluate(e) for e in environments):
                waiting.append((_normal(requirement.name), frozenset(requirement.extras)))
    return [found[name] for name in sorted(found)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(dist: Distribution) -> str | None:
    """The licence by its metadata: its expression, else its classifiers, else its free text, if that is short."""
    metadata = dist.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith(_CLASSIFIER)]
    names = [c.rpartition(" :: ")[2] for c in classifiers if c != "License :: OSI Approved"]
    if names:
        return ", ".join(names)
    text = metadata["License"].strip().splitlines() if "License" in metadata else []
    if text and len(text[0]) <= _LONGEST and text[0] != "UNKNOWN":
        return text[0].strip()
    return _by_file(dist)


def _by_file(dist: Distribution) -> str | None:
    """The first line of a licence file, which names well-known licences."""
    for file in dist.files or ():
        if re.search(r"licen[cs]e|copying", file.name, re.IGNORECASE) and file.suffix in ("", ".txt", ".md", ".rst"):
            try:
                lines = [line.strip(" #*=") for line in file.read_text().splitlines() if line.strip(" #*=")]
            except (OSError, UnicodeDecodeError):
                continue
            if lines and len(lines[0]) <= _LONGEST:
                return f"{lines[0]} (its file {file.name})"
    return None


def table(dists: Iterable[Distribution]) -> tuple[str, list[str]]:
    """The table, and the names of those whose licence is unknown."""
    rows, unknown = [], []
    for dist in dists:
        licence = licence_of(dist)
        if licence is None:
            unknown.append(dist.name)
        rows.append(f"| {dist.name} | {dist.version} | {licence or 'unknown'} |")
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows]) + "\n", unknown


_PAGE = """\
# Licences

vllm-handoff is under [Apache-2.0](../LICENSE). Neither its wheel nor its sdist contains any of what follows; pip
installs it. Names, versions and licences are those of the packages' own metadata, by `python tools/licences.py --page`.

## What vllm-handoff asks for

{own}
It runs inside vLLM (Apache-2.0), which brings its own.

## What vLLM 0.32 needs on a CPU

With the exact versions of [constraints.txt](../constraints.txt), in which everything is tested; what vLLM needs on
GPUs, NVIDIA's libraries among it, is in vLLM's own list.

{cpu}"""


def page() -> tuple[str, list[str]]:
    """docs/licences.md, and the names of those whose licence is unknown."""
    own, unknown_own = table(closure([]))
    cpu, unknown_cpu = table(closure(["cpu"]))
    return _PAGE.format(own=own, cpu=cpu), unknown_own + unknown_cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="with the needs of this extra, such as cpu")
    parser.add_argument("--page", action="store_true", help="print docs/licences.md")
    args = parser.parse_args()
    text, unknown = page() if args.page else table(closure(args.extra))
    print(text, end="")
    if unknown:
        print(f"error: no licence is known of {', '.join(unknown)}", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
