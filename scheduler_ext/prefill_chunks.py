"""How many prompt tokens a round takes: as few as keep the stages busy, as many as keep rounds from costing too much.

While a stage computes a chunk, the stage behind it waits for it, once for
every stage after the first: a chunk of c tokens costs a pipeline of p stages
(p - 1) c tokens' time before it is full, and a single long prompt that is one
chunk uses one stage at a time. Every chunk also costs a round, which reads all
weights, as long as the stage would compute w tokens. With W prompt tokens
waiting, (p - 1) c + (W / c) w is least at c = sqrt(W w / (p - 1)). The token
budget (max_num_batched_tokens) stays the upper bound.

SGLang's pipelines size chunks while they run as well, by the context's length;
the rule here is our own and looks at what waits.
"""

from __future__ import annotations

import math

# Where no stage time was measured, or it was measured badly: about what an 8B model has on an H200, and bounds.
WEIGHT_TOKENS = 256
_LEAST_WEIGHT_TOKENS = 64
_MOST_WEIGHT_TOKENS = 1024
# What a pipeline may cost to fill: chunks that share these tokens' time gain little by being smaller still, keep the
# hosts launching, and scatter requests that come together over rounds.
_FILL = 1024
_LEAST = 256
# The size is kept until so little of what once waited is left: chunks that shrank with
# the queue would make more rounds and fill the pipeline no sooner.
_LEFT = 1 / 16


class PrefillChunks:
    """Sizes the chunks of one engine.

    Args:
        stages: pipeline stages.
        most: the token budget of a round.
        weight_tokens: prompt tokens that a stage computes in the time in which it reads its weights; None: not known.
    """

    def __init__(self, stages: int, most: int, weight_tokens: float | None = None) -> None:
        self._stages = stages
        self._most = most
        self.weight_tokens = WEIGHT_TOKENS
        if weight_tokens is not None:
            self.weight_tokens = round(min(max(weight_tokens, _LEAST_WEIGHT_TOKENS), _MOST_WEIGHT_TOKENS))
        self.least = min(most, max(_LEAST, _FILL // max(1, stages - 1)))
        self._peak = 0

    @property
    def enough(self) -> int:
        """Prompt tokens from which on chunks are as large as they may be: no need to count further."""
        return self._most * self._most * (self._stages - 1) // self.weight_tokens + 1

    def size(self, waiting: int) -> int:
        """Most prompt tokens of the next round, when `waiting` of them could be in it. Ask for every round."""
        if self._stages == 1:
            return self._most
        if waiting <= self._peak * _LEFT:
            self._peak = 0
        self._peak = max(self._peak, waiting)
        best = math.sqrt(self._peak * self.weight_tokens / (self._stages - 1))
        return min(self._most, max(self.least, int(best)))
