"""What a prefill chunk costs and saves: advice on max_num_batched_tokens, which nothing here changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_handoff.scheduler_ext.model_shape import ModelShape
from vllm_handoff.scheduler_ext.stage_cost import H200, Device, RoundWork, stage_costs

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
# Of chunks that are this close to the fastest, the smallest: decoding requests wait less behind it.
CLOSE = 0.01


@dataclass(frozen=True)
class PrefillLoad:
    """Prompts that arrive together.

    Attributes:
        tokens: of all prompts.
        prompt: of one.
    """

    tokens: int = 32768
    prompt: int = 1024

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.prompt < 1:
            raise ValueError(f"prompts have at least one token, not {self}")


@dataclass(frozen=True)
class Chunk:
    """One chunk size.

    Attributes:
        tokens: of a chunk.
        seconds: to prefill the load.
        bubble: share of `seconds` in which the slowest stage waits for the pipeline to fill and to drain.
        rounds_cost: share of `seconds` for what every round costs, whatever it holds.
        gap: seconds between two tokens of a request that decodes meanwhile.
    """

    tokens: int
    seconds: float
    bubble: float
    rounds_cost: float
    gap: float


@dataclass(frozen=True)
class ChunkAdvice:
    """What each chunk size means for a load, and which to take.

    Attributes:
        load: the load.
        best: tokens of the chunk to take.
        chunks: all that were compared, smallest first.
    """

    load: PrefillLoad
    best: int
    chunks: tuple[Chunk, ...]

    @property
    def sentence(self) -> str:
        """The advice for people, several lines."""
        lines = [
            f"Prefill of {self.load.tokens} tokens that arrive together, by --max-num-batched-tokens:",
            "    chunk   seconds   filling and draining   cost of rounds   gap of a decoding request",
        ]
        for chunk in self.chunks:
            lines.append(
                f"  {chunk.tokens:>7}{chunk.seconds:>10.3f}{100 * chunk.bubble:>20.1f} %"
                f"{100 * chunk.rounds_cost:>15.1f} %{1000 * chunk.gap:>23.0f} ms"
                + ("   <- advised" if chunk.tokens == self.best else "")
            )
        return "\n".join(lines)


def advise_chunk(
    model: ModelShape, split: Sequence[int], load: PrefillLoad, device: Device = H200, ranks: int = 1
) -> ChunkAdvice:
    """Compare chunk sizes for a load that prefill dominates.

    n chunks pass P stages in the time of n + P - 1 rounds, so P - 1 of them are
    a bubble: small chunks make it small, and pay for more rounds.
    """
    costs = stage_costs(model, split, device, ranks)
    bubbles = len(split) - 1
    chunks = []
    for tokens in CHUNKS:
        held = min(tokens, load.tokens)
        work = RoundWork(
            prompt_tokens=held, samples=max(1.0, held / load.prompt), prompt_context=held * load.prompt / 2
        )
        slowest = max(cost.seconds(work) for cost in costs)
        rounds = -(-load.tokens // held)
        seconds = (rounds + bubbles) * slowest
        fixed = max(cost.seconds(RoundWork(samples=1)) for cost in costs)
        # The rounds of all stages' cohorts pass between two of a request's tokens.
        gap = len(split) * slowest
        chunks.append(Chunk(tokens, seconds, bubbles * slowest / seconds, rounds * fixed / seconds, gap))
    fastest = min(chunk.seconds for chunk in chunks)
    best = next(chunk.tokens for chunk in chunks if chunk.seconds <= (1 + CLOSE) * fastest)
    return ChunkAdvice(load, best, tuple(chunks))
