#!/usr/bin/env python3
"""Fuzz the control plane's decoders: whatever arrives is refused with a ProtocolError, or is a message like any other.

Inputs are made of real messages: bytes changed, cut, spliced and repeated, and
on the level of msgpack values of other types, sizes and depths put into their
fields; frames dropped, doubled and swapped. Each goes to both decoders and, as
a first message of a stranger, to the check that lets a peer in.

  tools/fuzz_messages.py                       a million inputs
  tools/fuzz_messages.py --inputs 20000 --seed 3
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from vllm_handoff.executor import messages
from vllm_handoff.executor.channel import check_hello
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.scheduler_ext.manifest import Manifest, Row, Rows

TOKEN = b"t" * messages.TOKEN_BYTES
WORLD_SIZE = 4
# What an input of a few hundred bytes may make the process grow by.
MOST_GROWTH_KB = 200_000

_MANIFEST = Manifest(round=7, num_tokens=3, width=2, rows=Rows.of(Row("a", 0, True), Row("b", 4, False)), needs=(3, 5))
SEEDS: list[messages.Command | messages.Report] = [
    messages.Welcome(b"p" * 32),
    messages.Round(0, 7, 6, "now", 4, 1, _MANIFEST, 12345),
    messages.Round(2**40, 0, -1, "deferred", 4),
    messages.Sample(3, 7, 4),
    messages.Call(5, "add", 4, True, 0),
    messages.Shutdown(9),
    messages.Hello(1, "reports", messages.proof(TOKEN, "worker", 1, "reports")),
    messages.Hello(2, "commands", messages.proof(TOKEN, "worker", 2, "commands")),
    messages.Ready(),
    messages.Reply(3, 4),
    messages.Failure(True, "round 7", "execute_model", "ValueError: no", "Traceback ...", 123, 4),
]
_COMMANDS, _REPORTS = get_args(messages.Command), get_args(messages.Report)
# Beginnings of values that announce more than follows, and bytes that msgpack does not know.
_NASTY = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1",
    b"\xdc\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6, b"\x91" * 500,
    b"\xd9\x04\xff\xfe\xfd\xfc", b"\xc7\xff\x01",
]  # fmt: skip


def frames_of(message: messages.Command | messages.Report) -> list[bytes]:
    """A message as it is sent, with a payload if it has one."""
    return [messages.encode(message), b"data"] if hasattr(message, "payload_bytes") else [messages.encode(message)]


def fuzzed(rng: random.Random) -> list[bytes]:
    """Frames made of a real message, mostly wrong."""
    frames = frames_of(rng.choice(SEEDS))
    with_values = rng.random() < 0.6
    if with_values:
        frames[0] = _with_other_values(rng, frames[0])
    for _ in range(rng.choice([0, 0, 1] if with_values else [1, 1, 1, 2, 3])):
        rng.choice(_CHANGES)(rng, frames)
    return frames


def _change_bytes(rng: random.Random, frames: list[bytes]) -> None:
    if frames and frames[0]:
        header = bytearray(frames[0])
        for _ in range(rng.choice([1, 1, 2, 8])):
            header[rng.randrange(len(header))] = rng.choice([rng.randrange(256), 0, 0xFF, 0x7F, 0x80])
        frames[0] = bytes(header)


def _cut(rng: random.Random, frames: list[bytes]) -> None:
    if frames:
        index = rng.randrange(len(frames))
        frames[index] = frames[index][: rng.randint(0, len(frames[index]))]


def _splice(rng: random.Random, frames: list[bytes]) -> None:
    if frames:
        at = rng.randint(0, len(frames[0]))
        part = rng.choice([rng.randbytes(rng.randint(0, 40)), rng.choice(_NASTY), messages.encode(rng.choice(SEEDS))])
        frames[0] = frames[0][:at] + part + frames[0][at + rng.choice([0, len(part)]) :]


def _repeat(rng: random.Random, frames: list[bytes]) -> None:
    if frames:
        begin, end = sorted(rng.randint(0, len(frames[0])) for _ in range(2))
        frames[0] = frames[0][:end] + frames[0][begin:end] * rng.randint(1, 4) + frames[0][end:]


def _rearrange(rng: random.Random, frames: list[bytes]) -> None:
    what = rng.randrange(4)
    if what == 0 and frames:
        del frames[rng.randrange(len(frames))]
    elif what == 1:
        frames.append(rng.choice([b"", b"data", b"x" * 5, *frames]))
    elif what == 2:
        frames.reverse()
    else:
        rng.shuffle(frames)


def _with_other_values(rng: random.Random, header: bytes) -> bytes:
    # Only of a header that is whole: without types, msgspec believes what a broken one says of sizes.
    value = msgspec.msgpack.decode(header)
    try:
        return msgspec.msgpack.encode(_mutated(rng, value, 0))
    except OverflowError:
        # A number that msgpack has no room for.
        return header


def _mutated(rng: random.Random, value: Any, depth: int) -> Any:
    if depth and rng.random() < 0.15:
        return _other_value(rng)
    if isinstance(value, dict):
        items = [(key, _mutated(rng, item, depth + 1)) for key, item in value.items()]
        if items and rng.random() < 0.2:
            del items[rng.randrange(len(items))]
        if rng.random() < 0.2:
            items.append((rng.choice(["more", "kind", "seq", "payload_bytes", "é"]), _other_value(rng)))
        return dict(items)
    if isinstance(value, list):
        found = [_mutated(rng, item, depth + 1) for item in value]
        return found * rng.choice([1, 1, 1, 3])
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([1, -1, 1 << 16, -(1 << 16), 1 << 62, -(1 << 62)])
    return value


def _other_value(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice([1, 30, 300])):
        deep = [deep]
    return rng.choice(
        [None, True, -1, 0, 2**63, -(2**63), 0.5, float("nan"), "", "hello", "x" * 2000, b"", b"p" * 32, [], {}, deep,
         [[]], {"a": 1}, [1, 2, 3], ["a", 0, True], (1 << 62), "commands", "reboot"]
    )  # fmt: skip


_CHANGES: list[Callable[[random.Random, list[bytes]], None]] = [
    _change_bytes, _cut, _splice, _repeat, _rearrange,
]  # fmt: skip


def check(frames: list[bytes]) -> Counter[str]:
    """Give one input to every decoder, and say what became of it.

    Raises:
        AssertionError: it was taken for what it is not.
        Exception: anything but a ProtocolError is a fault of a decoder.
    """
    found: Counter[str] = Counter()
    for name, decode, kinds in (
        ("command", messages.decode_command, _COMMANDS),
        ("report", messages.decode_report, _REPORTS),
    ):
        try:
            message, payload = decode(frames)
        except ProtocolError as error:
            assert str(error) and len(str(error)) < 4096, f"an error of {len(str(error))} characters"
            found[f"{name} refused"] += 1
            continue
        found[f"{name} valid"] += 1
        assert isinstance(message, kinds), f"{message!r} is no {name}"
        # What was let through can be sent and read again: nothing in it is of another type than it says.
        again, _ = decode([messages.encode(message), *frames[1:]])
        assert again == message or message != message, f"{message!r} is not itself"
        assert (None if payload is None else len(payload)) == getattr(message, "payload_bytes", None)
    for link in ("commands", "reports"):
        try:
            hello = check_hello(frames, TOKEN, WORLD_SIZE, link)
        except ProtocolError:
            continue
        found["stranger let in"] += 1
        # Nobody without the token: the proof is the one for this rank and link.
        assert hello.proof == messages.proof(TOKEN, "worker", hello.rank, link) and hello.rank < WORLD_SIZE
    return found


def run(inputs: int, seed: int, say: Callable[[int], None] = lambda done: None) -> Counter[str]:
    """Check so many inputs; what became of them, by kind."""
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(inputs):
        frames = fuzzed(rng)
        try:
            total += check(frames)
        except Exception:
            print(f"input {number} of seed {seed}: {frames!r}", file=sys.stderr)
            raise
        if number % 50_000 == 0:
            say(number)
        if number % 100 == 0:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < MOST_GROWTH_KB, f"grown by {grown} kB at input {number}: a size was believed unchecked"
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    args = parser.parse_args()
    begin = time.monotonic()
    total = run(args.inputs, args.seed, lambda done: print(f"{done} inputs", flush=True) if done else None)
    seconds = time.monotonic() - begin
    print(f"{args.inputs} inputs in {seconds:.0f} s, {args.inputs / seconds:.0f} a second; nothing but clean errors:")
    for kind, count in sorted(total.items()):
        print(f"  {kind:<20}{count:>12}")


if __name__ == "__main__":
    main()
