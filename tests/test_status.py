"""`kvass status`: members, their loads and the store, as tables that people read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from kvass.launch import store_status
from kvass.launch.status import members_table
from kvass.launch.store_status import views_of


def printed(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue().splitlines()


def a_member(role: str, **facts: object) -> dict[str, Any]:
    plain = {"role": role, "id": f"{role}-0", "pid": 4_194_304, "state": "ready"}
    return {**plain, "address": "127.0.0.1:42109", "load": {}, **facts}


@pytest.mark.parametrize(
    ("state", "load", "word"),
    [
        ("ready", {"draining": 1}, "drains"),
        ("ready", {"draining": 1, "drain_held": 1}, "held up"),
        ("draining", {"draining": 1, "drained": 1}, "drained"),
    ],
)
def test_a_store_node_that_leaves_has_one_word_in_both_tables(
    state: str, load: Mapping[str, int], word: str
) -> None:
    node = a_member("store", state=state, load=load)
    row = next(line for line in printed(members_table([node])) if "store-0" in line)
    assert row.rstrip().endswith(f" {word}")
    cluster = {"members": [node], "store": [{"id": "store-0", **load}]}
    assert [store_status.word_of(each) for each in views_of(cluster, cluster, 1.0)] == [word]


def test_the_state_of_others_is_what_the_gateway_says() -> None:
    lost = a_member("store", state="lost", load={"draining": 1, "drained": 1})
    others = [a_member("decode", state="draining"), a_member("store"), lost]
    rows = [line.split()[-1] for line in printed(members_table(others)) if "127.0.0.1" in line]
    assert rows == ["draining", "ready", "lost"]
