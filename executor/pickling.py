"""Pickles of vLLM's objects for payload frames."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle by reference; functions and classes that have no importable name go by value."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
