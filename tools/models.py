"""Get a model folder that vLLM can load, making it the first time it is asked for.

Models are kept in .cache/models/ and made once. A folder appears there only
when it is complete, and several processes may ask for the same one at once.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_recipes import RECIPES, ModelError, Recipe, Say, sha256_of

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"
# Written last, so a folder that has it is complete. Holds the recipe's version and each file's size and SHA-256.
MARKER = "complete.json"

EXAMPLES = """\
examples:
  python tools/models.py tiny-llama            make it if need be, print its folder
  python tools/models.py smollm2-135m          a real model, for `make demo`
  python tools/models.py --all                 everything, for instance before working offline
  python tools/models.py --verify smollm2-135m read every byte again and compare the checksums
  vllm serve $(python tools/models.py tiny-llama) --dtype float32
"""


def _quiet(_: str) -> None:
    """Report no progress."""


def _to_stderr(line: str) -> None:
    # Standard output carries nothing but folders, so that $(...) works.
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _locked(name: str, cache: Path, say: Say) -> Iterator[None]:
    """Hold the model's lock; the system lets go of it however this process ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is making it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _facts(path: Path) -> dict[str, int | str]:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def is_complete(folder: Path, recipe: Recipe, verify: bool = False) -> bool:
    """Whether the folder holds what this recipe makes; with `verify`, to the last byte."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["version"] != recipe.version:
            return False
        for name, facts in marker["files"].items():
            path = folder / name
            if path.stat().st_size != facts["size"] or (verify and sha256_of(path) != facts["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def get(name: str, *, cache: Path = CACHE, say: Say = _quiet, verify: bool = False) -> Path:
    """The model's folder, made first if it is missing, incomplete or of an older recipe.

    Raises:
        ModelError: there is no such model, or it could not be made.
    """
    if name not in RECIPES:
        raise ModelError(f"There is no model {name!r}. Choose one of: {', '.join(RECIPES)}.")
    recipe, folder = RECIPES[name], cache / name
    if not verify and is_complete(folder, recipe):
        return folder
    with _locked(name, cache, say):
        if is_complete(folder, recipe, verify):
            return folder
        partial = cache / f".{name}.partial"
        # Left by a process that was killed: whoever holds the lock owns it.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            recipe.make(partial, cache, lambda line: say(f"{name}: {line}"))
        except ImportError as error:
            raise ModelError(f"{error.name} is not installed: run `make env`, then use .venv/bin/python.") from error
        files = {str(p.relative_to(partial)): _facts(p) for p in _files(partial)}
        (partial / MARKER).write_text(json.dumps({"version": recipe.version, "files": files}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        say(f"{name}: ready in {folder}")
    return folder


def build_parser() -> argparse.ArgumentParser:
    models = "\n".join(f"  {name:<14} {recipe.what}" for name, recipe in RECIPES.items())
    parser = argparse.ArgumentParser(
        prog="python tools/models.py",
        description=f"{__doc__}\nmodels:\n{models}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help="which to get; its folder is printed, one a line")
    parser.add_argument("--all", action="store_true", help="get every model")
    parser.add_argument(
        "--verify", action="store_true", help="compare every SHA-256; make the model anew if one is wrong"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept (default: .cache/models)")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    names = list(RECIPES) if args.all else args.names
    if not names:
        parser.print_help()
        return 2
    # The libraries look for updates on a network unless told not to.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        for name in names:
            print(get(name, cache=args.cache, say=_to_stderr, verify=args.verify))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
