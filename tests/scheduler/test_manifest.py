"""The manifest: what may be in one, and that it survives the wire."""

from __future__ import annotations

import msgspec
import pytest

from vllm_handoff.scheduler_ext.manifest import HEADER_SIZE, Manifest, Row, Rows, attach, detach, manifest_of

ROWS = Rows.of(Row("a", 3, True), Row("b", 0, False))


def test_survives_the_wire() -> None:
    manifest = Manifest(round=7, num_tokens=12, width=1, rows=ROWS, needs=(2, 5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def test_payload_size_is_fixed_by_rows_and_width() -> None:
    assert Manifest(round=1, num_tokens=2, rows=ROWS).payload_size == 2 * (HEADER_SIZE + 2 * (1 + 1))
    assert Manifest(round=1, num_tokens=9, rows=ROWS, width=4).payload_size == 2 * (HEADER_SIZE + 2 * (4 + 3 + 1))


@pytest.mark.parametrize(
    "fields, what",
    [
        (dict(round=-1, num_tokens=1), "negative"),
        (dict(round=0, num_tokens=1, width=0), "width"),
        (dict(round=1, num_tokens=0, rows=ROWS), "without tokens"),
        (dict(round=1, num_tokens=1, rows=Rows.of(Row("b", 0, False))), "at least one row"),
        (dict(round=4, num_tokens=1, needs=(3, 2)), "in order"),
        (dict(round=4, num_tokens=1, needs=(4,)), "earlier rounds"),
        (dict(round=4, num_tokens=1, dispatch=False), "must be dispatched"),
        (dict(round=4, num_tokens=0, needs=(1,), dispatch=False), "must be dispatched"),
    ],
)
def test_refuses_what_stages_could_not_obey(fields: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Manifest(**fields)


def test_unknown_fields_are_refused() -> None:
    data = msgspec.msgpack.encode({"round": 0, "num_tokens": 1, "colour": "red"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=Manifest)


def test_rides_on_a_scheduler_output() -> None:
    class Output:
        pass

    output = Output()
    assert manifest_of(output) is None
    manifest = Manifest(round=0, num_tokens=0, dispatch=False)
    attach(output, manifest)
    assert manifest_of(output) is manifest
    assert detach(output) is manifest
    assert manifest_of(output) is None
