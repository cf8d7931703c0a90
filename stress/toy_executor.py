"""HandoffExecutor with the toy model: whoever imports it knows the model.

A spawned engine process imports its executor's class before anything looks at
the model, so this is enough there too; worker_extension.py does it for workers.
"""

from __future__ import annotations

from vllm_handoff.executor.executor import HandoffExecutor
from vllm_handoff.stress import toy_model

toy_model.register()


class ToyExecutor(HandoffExecutor):
    """The executor under test, unchanged."""
