"""The control plane's messages: one struct a kind, msgpack on the wire.

A message is a header frame (one of the structs below) and, if the struct has a
`payload_bytes` field, one payload frame of exactly that many bytes. Payloads
are pickles of vLLM's own objects; they are opened only after the header was
decoded and only if the peer has proved itself (see `proof`).

Commands go from the executor to a worker and form one ordered stream, numbered
by `seq` without gaps. Reports go back and name the command that they answer.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.scheduler_ext.manifest import Manifest

MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 4 << 30
MAX_TEXT = 256 << 10
TOKEN_BYTES = 32
PROOF_BYTES = 32
ALL_RANKS = -1
NO_ROUND = -1
# Exit status of a worker that has sent the Failure it ends for.
REPORTED_EXIT = 70

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
ReplyRank = Annotated[int, msgspec.Meta(ge=ALL_RANKS, lt=1 << 16)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
RoundNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
PreviousRound = Annotated[int, msgspec.Meta(ge=NO_ROUND, lt=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
LinkName = Literal["commands", "reports"]
Sampling = Literal["none", "now", "deferred"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"):
    pass


class Welcome(_Message, frozen=True, tag="welcome"):
    """The executor's answer to a Hello on the command link; proves the executor."""

    proof: Proof


class Round(_Message, frozen=True, tag="round"):
    """Run one round. Payload: the SchedulerOutput, without its manifest.

    `follows` is the round that was sent before this one (rounds that were not
    dispatched leave gaps in `number`, so a worker cannot count on its own).
    `sampling`: "now" if no grammar can come and sampling follows the forward
    at once, "deferred" if a Sample message will follow, "none" if the forward's
    result is the round's result (no tokens, or a pooling model). `sent_ns`: when
    it was sent, by the machine's monotonic clock; 0 if nobody asked. `shared_bytes`:
    if not 0, the payload's frame is empty, and it is so many bytes of the shared
    memory (shared_payload.py) until the round's reply.
    """

    seq: Seq
    number: RoundNumber
    follows: PreviousRound
    sampling: Sampling
    payload_bytes: Size
    reply_rank: ReplyRank = ALL_RANKS
    manifest: Manifest | None = None
    sent_ns: int = 0
    shared_bytes: Size = 0


class Sample(_Message, frozen=True, tag="sample"):
    """Sample the round `number`, sent as deferred. Payload: the GrammarOutput, or None.

    Its result is the reply to the Round, not to this message.
    """

    seq: Seq
    number: RoundNumber
    payload_bytes: Size


class Call(_Message, frozen=True, tag="call"):
    """Call a worker method. Payload: (args, kwargs), or (callable, args, kwargs) if `pickled`."""

    seq: Seq
    name: Name
    payload_bytes: Size
    pickled: bool = False
    reply_rank: ReplyRank = ALL_RANKS


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """Leave the loop and exit; nothing follows."""

    seq: Seq


class Hello(_Message, frozen=True, tag="hello"):
    """First message on each of a worker's sockets."""

    rank: Rank
    link: LinkName
    proof: Proof


class Ready(_Message, frozen=True, tag="ready"):
    """The worker has loaded its model and takes commands."""


class Reply(_Message, frozen=True, tag="reply"):
    """The result of the command `seq`. Payload: the pickled result."""

    seq: Seq
    payload_bytes: Size


class Failure(_Message, frozen=True, tag="failure"):
    """Something raised on a worker.

    `fatal`: the worker cannot go on and exits after this message (a round, or
    its start); otherwise only the call `seq` has failed. `at` is the system's
    monotonic clock in ns: a failing stage makes its peers fail too, and the
    earliest failure is the cause.
    """

    fatal: bool
    where: Name
    phase: Name
    error: Text
    traceback: Text
    at: int
    seq: PreviousRound = -1


Command = Welcome | Round | Sample | Call | Shutdown
Report = Hello | Ready | Reply | Failure
Frame = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def proof(token: bytes, side: Literal["executor", "worker"], rank: int, link: LinkName) -> bytes:
    """What shows that a peer knows the token, without sending the token."""
    return hmac.digest(token, f"{side}/{rank}/{link}".encode(), hashlib.sha256)


def is_proof(found: bytes, token: bytes, side: Literal["executor", "worker"], rank: int, link: LinkName) -> bool:
    return hmac.compare_digest(found, proof(token, side, rank, link))


def encode(message: Command | Report) -> bytes:
    return _encoder.encode(message)


def clip(text: str) -> str:
    """Cut a text to what a message may carry, keeping both ends."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 32
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def decode_command(frames: Sequence[Frame]) -> tuple[Command, Frame | None]:
    """Decode the frames of a command into its struct and payload.

    Raises:
        ProtocolError: the message is not a well-formed command.
    """
    return _decode(frames, _command_decoder, "command")


def decode_report(frames: Sequence[Frame]) -> tuple[Report, Frame | None]:
    """Decode the frames of a report into its struct and payload.

    Raises:
        ProtocolError: the message is not a well-formed report.
    """
    return _decode(frames, _report_decoder, "report")


def _decode(frames: Sequence[Frame], decoder: msgspec.msgpack.Decoder, what: str) -> tuple:
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"A {what} has 1 or 2 frames, got {len(frames)}.")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"A {what}'s header is {len(frames[0])} bytes, more than the limit of {MAX_HEADER_BYTES}.")
    try:
        message = decoder.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"A {what}'s header of {len(frames[0])} bytes cannot be decoded: {error}") from error
    expected = getattr(message, "payload_bytes", None)
    payload = frames[1] if len(frames) == 2 else None
    found = None if payload is None else len(payload)
    if found != expected:
        raise ProtocolError(
            f"A {what} of kind {type(message).__name__} announces "
            f"{'no payload' if expected is None else f'{expected} payload bytes'}, "
            f"got {'none' if found is None else found}."
        )
    return message, payload
