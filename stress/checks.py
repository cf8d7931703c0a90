"""What an answer should have been, and what is wrong with it in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_handoff.stress import toy_tokens
from vllm_handoff.stress.plan import Case, Planned, pool_index

# The finish reason of a client that went away, and of an answer that ended with an error.
LEFT, ERROR = "left", "error"


class Expected(NamedTuple):
    """The right answer."""

    token_ids: list[int]
    finish_reason: str


class Problem(NamedTuple):
    """Something that must not be.

    Attributes:
        kind: "lost", "doubled", "swapped", "wrong", "short", "long", "finish", "error", "unanswered", "stall",
            "undetected", "slow", "leak", "start" or "exit".
        number: the request that it was seen at, if any.
    """

    kind: str
    what: str
    number: int | None = None


def check(
    request: Planned, expected: Expected, tokens: list[int], finish: str, others: Iterable[int] = ()
) -> Problem | None:
    """Compare an answer with the right one; that of a client that went away, with its beginning.

    Args:
        others: tokens that answers to other requests had at that time, to tell a swap from other wrong tokens.
    """
    wanted = expected.token_ids
    for index, (found, right) in enumerate(zip(tokens, wanted)):
        if found != right:
            kind = _kind(tokens, wanted, index, set(others))
            return Problem(
                kind,
                f"request {request.number}, token {index} of {len(wanted)}: {found} instead of {right} ({kind}); "
                f"the answer has {_around(tokens, index)}, and should have {_around(wanted, index)}",
                request.number,
            )
    if len(tokens) > len(wanted):
        kind = "doubled" if tokens[len(wanted)] == tokens[len(wanted) - 1] else "long"
        return Problem(kind, f"request {request.number}: {len(tokens)} tokens instead of {len(wanted)}", request.number)
    if finish == LEFT:
        return None
    if len(tokens) < len(wanted):
        what = f"request {request.number}: {len(tokens)} tokens instead of {len(wanted)}, ended by {finish!r}"
        return Problem("short", what, request.number)
    if finish != expected.finish_reason:
        what = f"request {request.number}: ended by {finish!r} instead of {expected.finish_reason!r}"
        return Problem("finish", what, request.number)
    return None


def _kind(tokens: list[int], wanted: list[int], index: int, others: set[int]) -> str:
    """The likeliest of what can have happened at the first wrong token."""
    following = slice(index, index + 3)
    if tokens[following] == wanted[index + 1 : index + 1 + len(tokens[following])]:
        return "lost"
    if (
        index
        and tokens[index] == wanted[index - 1]
        and tokens[index + 1 : index + 3] == wanted[index : index + 2][: len(tokens) - index - 1]
    ):
        return "doubled"
    if tokens[index] in others:
        return "swapped"
    return "wrong"


def _around(tokens: list[int], index: int) -> str:
    begin = max(0, index - 2)
    return f"{'... ' if begin else ''}{' '.join(map(str, tokens[begin : index + 4]))}"


Oracle = Callable[[Case, Planned], Expected]


def toy_oracle(layers: int, context: int) -> Oracle:
    """The toy model's known function."""

    def expected(case: Case, request: Planned) -> Expected:
        return Expected(*toy_tokens.answer(request.prompt, request.params, layers, context))

    return expected


def reference_oracle(answers: dict[int, Expected]) -> Oracle:
    """What the same requests of a pool gave when each ran alone."""

    def expected(case: Case, request: Planned) -> Expected:
        return answers[pool_index(case.mix, case.life, request.number)]

    return expected
