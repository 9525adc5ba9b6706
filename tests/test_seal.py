"""Signed messages of the bus: another topic, another secret, another byte, an old one, a copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.common import seal, wire
from kvass.common.errors import Invalid, KvassError, Unauthorized
from kvass.common.seal import COMMAND_S, COMMANDS_MAX, Command, Orders, Seal, new_command
from kvass.common.secret import Secret

SECRET = Secret("what all members know", "the test")


def sealed(body: object = 7, topic: str = "t") -> bytes:
    return Seal(SECRET).close(topic, body)


def test_what_a_member_says_another_one_reads() -> None:
    one, other = Seal(SECRET), Seal(SECRET)
    assert other.open("t", one.close("t", {"running": 3}), wire.Facts) == (1, {"running": 3})
    assert other.open("t", one.close("t", None), type(None)) == (2, None)


def test_another_secret_or_another_topic_is_not_of_this_cluster() -> None:
    strange = Seal(Secret("what somebody else knows", "x")).close("t", 7)
    for topic, payload in (("t", strange), ("t/other", sealed()), ("", sealed())):
        with pytest.raises(Unauthorized):
            Seal(SECRET).open(topic, payload, int)


@given(st.data())
def test_no_byte_may_change(data: st.DataObject) -> None:
    payload = bytearray(sealed({"a": 1}))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(KvassError):
        Seal(SECRET).open("t", bytes(payload), wire.Facts)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(KvassError):
        Seal(SECRET).open("t", payload, int)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        wire.pack([1, {"verb": "drain"}]),
        wire.pack([2, b"m", b"p", 1]),
        wire.pack([2, "m", "p"]),
        wire.pack([2, {"verb": "drain"}]),
        wire.pack(7),
        sealed()[:-1],
        sealed("text, not a number"),
        b"x" * (seal.PAYLOAD_BYTES_MAX + 1),
    ],
)
def test_payloads_of_another_kind_are_invalid(payload: bytes) -> None:
    with pytest.raises(Invalid):
        Seal(SECRET).open("t", payload, int)


def test_payloads_are_bounded() -> None:
    with pytest.raises(Invalid, match="over"):
        sealed(b"x" * seal.PAYLOAD_BYTES_MAX)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [1], None])
def test_a_load_that_nobody_can_reckon_with_is_invalid(value: object) -> None:
    with pytest.raises(Invalid):
        Seal(SECRET).open("t", sealed({"running": value}), wire.Facts)


def test_an_older_message_and_the_same_one_again_are_told_apart() -> None:
    heard = Seal(SECRET)
    assert [heard.step("t", number) for number in (3, 3, 2, 9, 4)] == [3, 0, -1, 6, -5]
    assert heard.step("other", 1) == 1


def test_numbers_are_kept_of_so_many_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "TOPICS_MAX", 2)
    heard = Seal(SECRET)
    for topic in ("a", "b", "a", "c"):
        heard.step(topic, 5)
    assert (heard.step("a", 5), heard.step("b", 5)) == (0, 5), "the one heard least lately went"


def command(**changes: object) -> Command:
    fields: dict[str, object] = {"verb": "drain", "to": "me", "command_id": "c", "issued_s": 100.0}
    return Command(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"to": "my last start"}, "another start"),
        ({"issued_s": 100.0 - COMMAND_S - 1}, "61 s ago"),
        ({"issued_s": 100.0 + COMMAND_S + 1}, "-61 s ago"),
    ],
)
def test_commands_for_others_and_old_ones_are_not_obeyed(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(Invalid, match=reason):
        Orders("me").check(command(**changes), 100.0)


def test_a_command_is_obeyed_once_while_it_is_young_enough_to_be_obeyed() -> None:
    orders = Orders("me")
    orders.check(command(issued_s=100.0 + COMMAND_S), 100.0)
    for now_s in (100.0, 100.0 + COMMAND_S, 100.0 + 2 * COMMAND_S):
        with pytest.raises(Invalid, match="obeyed already"):
            orders.check(command(issued_s=100.0 + COMMAND_S), now_s)
    with pytest.raises(Invalid, match="s ago"):
        orders.check(command(issued_s=100.0 + COMMAND_S), 100.1 + 2 * COMMAND_S)
    orders.check(command(command_id="d", issued_s=1000.0), 1000.0)
    assert list(orders._obeyed) == ["d"], "what is too old to be obeyed is forgotten"


def test_more_commands_than_anybody_gives_are_refused() -> None:
    orders = Orders("me")
    for number in range(COMMANDS_MAX):
        orders.check(command(command_id=str(number)), 100.0)
    with pytest.raises(Invalid, match=f"{COMMANDS_MAX} commands"):
        orders.check(command(command_id="more"), 100.0)
    first, second = (new_command("drain", "me", 1.0, {}) for _ in range(2))
    assert first.command_id != second.command_id
