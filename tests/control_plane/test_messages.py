"""The message types: what is encoded is decoded, and whatever else arrives is refused with a clear error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuzz_messages
from vllm_handoff.executor import messages
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.executor.messages import (
    Call,
    Failure,
    Hello,
    Ready,
    Reply,
    Round,
    Sample,
    Shutdown,
    Welcome,
    decode_command,
    decode_report,
    encode,
)
from vllm_handoff.scheduler_ext.manifest import Manifest, Row, Rows

TOKEN = b"t" * messages.TOKEN_BYTES
MANIFEST = Manifest(round=7, num_tokens=3, width=2, rows=Rows.of(Row("a", 0, True), Row("b", 4, False)), needs=(3, 5))
COMMANDS = [
    Welcome(b"p" * 32),
    Round(0, 7, 6, "now", 4, 1, MANIFEST),
    Round(2**40, 0, -1, "deferred", 4),
    Sample(3, 7, 4),
    Call(5, "add", 4, True, 0),
    Shutdown(9),
]
REPORTS = [
    Hello(1, "reports", b"p" * 32),
    Ready(),
    Reply(3, 4),
    Failure(True, "round 7", "execute_model", "ValueError: no", "Traceback ...", 123, 4),
]


def frames_of(message: messages.Command | messages.Report) -> list[bytes]:
    return [encode(message), b"data"] if hasattr(message, "payload_bytes") else [encode(message)]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m).__name__)
def test_a_command_survives_the_wire(message: messages.Command) -> None:
    assert decode_command(frames_of(message))[0] == message


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: type(m).__name__)
def test_a_report_survives_the_wire(message: messages.Report) -> None:
    assert decode_report(frames_of(message))[0] == message


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: type(m).__name__)
def test_a_report_is_no_command(message: messages.Report) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        decode_command(frames_of(message))


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(frames: list[bytes]) -> None:
    for decode in (decode_command, decode_report):
        with pytest.raises(ProtocolError):
            decode(frames)


@given(st.sampled_from(COMMANDS), st.data())
def test_a_truncated_command_is_refused(message: messages.Command, data: st.DataObject) -> None:
    header, *payload = frames_of(message)
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(ProtocolError):
        decode_command([header[:cut], *payload])


@given(st.sampled_from(COMMANDS), st.data())
def test_a_corrupt_command_is_refused_or_another_valid_one(message: messages.Command, data: st.DataObject) -> None:
    header, *payload = frames_of(message)
    at = data.draw(st.integers(0, len(header) - 1))
    corrupt = bytearray(header)
    corrupt[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded, _ = decode_command([bytes(corrupt), *payload])
    except ProtocolError:
        return
    # A flipped bit may give another number or letter; it never gives another type.
    assert isinstance(decoded, Welcome | Round | Sample | Call | Shutdown)


@given(st.sampled_from(REPORTS), st.binary(max_size=40), st.integers(0, 60))
def test_a_spliced_report_is_refused_or_valid(message: messages.Report, splice: bytes, at: int) -> None:
    header, *payload = frames_of(message)
    try:
        decoded, _ = decode_report([header[:at] + splice + header[at:], *payload])
    except ProtocolError:
        return
    assert isinstance(decoded, Hello | Ready | Reply | Failure)


def test_whatever_arrives_is_refused_or_a_message() -> None:
    # `make fuzz` is the same, for a minute and more.
    found = fuzz_messages.run(20_000, seed=1)
    assert found["command refused"] > 10_000 and found["report refused"] > 10_000
    # It is not all noise: some of it is still what it was, or something else that is valid.
    assert found["command valid"] > 300 and found["report valid"] > 300 and found["stranger let in"] > 100


def test_the_fuzzer_notices_what_it_is_there_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "is_proof", lambda *args: True)
    with pytest.raises(AssertionError):
        fuzz_messages.run(20_000, seed=1)
    monkeypatch.undo()
    # A decoder that lets other errors out.
    monkeypatch.setattr(messages, "decode_report", lambda frames: msgspec.msgpack.decode(frames[0]))
    with pytest.raises((msgspec.MsgspecError, ValueError, IndexError)):
        fuzz_messages.run(20_000, seed=1)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "1 or 2 frames, got 0"),
        ([b"a", b"b", b"c"], "1 or 2 frames, got 3"),
        ([encode(Sample(0, 0, 4))], "announces 4 payload bytes, got none"),
        ([encode(Sample(0, 0, 4)), b"12345"], "announces 4 payload bytes, got 5"),
        ([encode(Shutdown(0)), b""], "announces no payload, got 0"),
        ([encode(Shutdown(0)) + b"x"], "cannot be decoded"),
        ([msgspec.msgpack.encode({"kind": "reboot"})], "cannot be decoded"),
        ([msgspec.msgpack.encode({"kind": "shutdown", "seq": -1})], "cannot be decoded"),
        ([msgspec.msgpack.encode({"kind": "shutdown", "seq": 1, "more": 2})], "cannot be decoded"),
        ([msgspec.msgpack.encode({"kind": "shutdown", "seq": "1"})], "cannot be decoded"),
        ([b"\x91" * 200_000], "cannot be decoded"),
    ],
)
def test_what_is_wrong_is_named(frames: list[bytes], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode_command(frames)


def test_an_oversized_header_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_HEADER_BYTES", 10)
    with pytest.raises(ProtocolError, match="more than the limit"):
        decode_command([encode(Shutdown(0)) + b" " * 20])


def test_a_manifest_that_breaks_its_rules_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode(Round(0, 7, 6, "now", 4, 1, MANIFEST)))
    raw["manifest"]["needs"] = [9]
    with pytest.raises(ProtocolError, match="needs must name earlier rounds"):
        decode_command([msgspec.msgpack.encode(raw), b"data"])


def test_a_proof_is_for_one_side_rank_and_link() -> None:
    proof = messages.proof(TOKEN, "worker", 1, "commands")
    assert messages.is_proof(proof, TOKEN, "worker", 1, "commands")
    assert not messages.is_proof(proof, TOKEN, "executor", 1, "commands")
    assert not messages.is_proof(proof, TOKEN, "worker", 2, "commands")
    assert not messages.is_proof(proof, TOKEN, "worker", 1, "reports")
    assert not messages.is_proof(proof, b"u" * 32, "worker", 1, "commands")


@given(st.text(max_size=300))
def test_a_clipped_text_fits(text: str) -> None:
    long = text + "x" * messages.MAX_TEXT + text
    assert len(messages.clip(long)) <= messages.MAX_TEXT
    assert messages.clip(text) == text
