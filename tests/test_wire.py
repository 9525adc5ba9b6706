"""Messages as bytes: golden bytes, round trips, truncation at every length, bounds."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.common import wire
from kvass.common.errors import Invalid

REQUESTS = wire.Tags(wire.WORKER_REQUESTS)
REPLIES = wire.Tags(wire.WORKER_REPLIES)

EXAMPLES: list[wire.Message] = [
    wire.Prefill(job_id="j", tokens=(1, 2**32 - 1), hold_owner="o", deadline_s=1.5, salt=b"s" * 32),
    wire.Generate(
        request_id="r",
        tokens=(5, 6),
        prompt_length=2,
        sampling=wire.Sampling(temperature=0.0, logit_bias={7: -100.0}),
        stop=wire.Stop(max_tokens=3, strings=("\n", "stop")),
        deadline_s=2.0,
    ),
    wire.PrefillOver(request_id="r"),
    wire.Forget(keys=(b"k" * 32,)),
    wire.PrefillProgress(computed=((0, 48),), missing=((1, 2),), done=True),
    wire.Delta(token_ids=(1,), text="né", finish_reason="stop", computed=((16, 20),)),
    wire.Done(),
]


def tags_of(message: wire.Message) -> wire.Tags:
    return REQUESTS if isinstance(message, wire.Request) else REPLIES


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda each: type(each).__name__)
def test_round_trip(message: wire.Message) -> None:
    assert tags_of(message).decode(wire.unpack(wire.pack(message))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda each: type(each).__name__)
def test_truncation_at_every_length_is_invalid(message: wire.Message) -> None:
    packed = wire.pack(message)
    for size in range(len(packed)):
        with pytest.raises(Invalid):
            wire.unpack(packed[:size])


def test_golden_bytes_of_version_6() -> None:
    # A change here is a change of the protocol: give it a new version.
    assert wire.PROTOCOL_VERSION == 7
    assert wire.pack(wire.PrefillOver(request_id="r-1")).hex() == (
        "82a174ac70726566696c6c5f6f766572aa726571756573745f6964a3722d31"
    )
    assert wire.pack(wire.Delta(token_ids=(7,), text="a")).hex() == (
        "86a174a564656c7461a9746f6b656e5f6964739107a474657874a161ad66696e6973685f726561736f6ea0"
        "a8636f6d707574656490ab73746f705f726561736f6ea0"
    )
    assert wire.pack(wire.Delta(finish_reason="stop", stop_reason=7)).hex().endswith("6e07")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_invalid(data: bytes) -> None:
    try:
        value = wire.unpack(data)
    except Invalid:
        return
    for tags in (REQUESTS, REPLIES):
        try:
            tags.decode(value)
        except Invalid:
            pass


def generate(**sampling: object) -> dict[str, object]:
    return {
        "t": "generate",
        "request_id": "r",
        "tokens": [1],
        "prompt_length": 1,
        "sampling": sampling,
        "stop": {"max_tokens": 1},
        "deadline_s": 1.0,
    }


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "must be a map"),
        ({}, "unknown message None"),
        ({"t": "Prefill"}, "unknown message 'Prefill'"),
        ({"t": ["prefill"]}, "unknown message"),
        ({"t": "prefill_over"}, "request_id"),
        ({"t": "prefill_over", "request_id": 7}, "request_id"),
        ({"t": "prefill_over", "request_id": "r", "more": 1}, "more"),
        ({"t": "forget", "keys": ["text"]}, "keys"),
        (generate(temperature=float("nan")), "temperature"),
        (generate(top_p=-1.0), "top_p"),
        (generate(min_p=2.0), "min_p"),
        (generate(choice=-1), "choice"),
        (generate(repetition_penalty=1e-40), "repetition_penalty"),
        (generate(logit_bias={"1": 1e30}), "logit_bias"),
        (generate() | {"prompt_length": -3}, "prompt_length"),
        (generate() | {"salt": b"s" * 65}, "salt"),
        (generate() | {"deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(value: object, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        REQUESTS.decode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd" + (wire.ITEMS_MAX + 1).to_bytes(4, "big") + b"\xc0" * (wire.ITEMS_MAX + 1),
        b"\xdf" + (5000).to_bytes(4, "big"),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb({1: 2}),
        b"\xa1\xff",
        b"\x91" * 5000,
        msgpack.packb(1) + b"more",
    ],
    ids=["array", "map", "ext", "integer key", "no UTF-8", "depth", "trailing bytes"],
)
def test_bounds_and_forms_that_are_refused(data: bytes) -> None:
    with pytest.raises(Invalid):
        wire.unpack(data)


def test_a_tag_is_taken_once() -> None:
    with pytest.raises(AssertionError):
        wire.Tags([wire.Done, wire.Done])
