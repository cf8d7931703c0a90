"""What mkdocs does not know of this project: links to files of the repository, and pages that are yet to be written.

Pages are read in the repository too, where `../executor/stats.py` is a good
link. On the site there is no such file: the link becomes plain text, after a
check that the file exists.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
# mkdocs counts warnings below this name, and --strict fails for them.
log = logging.getLogger("mkdocs.hooks.vllm_handoff")


def on_config(config: Any) -> Any:
    """Leave pages out of the menu that do not exist."""
    docs = Path(config["docs_dir"])
    config["nav"] = [entry for entry in config["nav"] if all((docs / page).is_file() for page in entry.values())]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave docs/ into text, and complain of those that lead nowhere."""

    def text_of(link: re.Match[str]) -> str:
        text, target = link.group(1), link.group(2)
        if not (ROOT / target).exists():
            log.warning("%s links to ../%s, which does not exist", page.file.src_path, target)
        return text if text.startswith("`") else f"`{text.strip('*')}`"

    return _OUTSIDE.sub(text_of, markdown)
