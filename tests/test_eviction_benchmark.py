"""The eviction benchmark on a small trace made here: Belady is best, the store's policy next."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

import eviction
from rig_trace import PIECE, prompts_of


def write_trace(path: Path) -> None:
    """Write conversations that go on or don't, all with one first block."""
    rng = random.Random(5)
    going: list[list[int]] = []
    fresh = 1
    lines = []
    for _ in range(1500):
        goes_on = bool(going) and rng.random() < 0.5
        chain = going.pop(rng.randrange(len(going))) if goes_on else [0]
        added = rng.randrange(2, 12)
        chain = [*chain, *range(fresh, fresh + added)]
        fresh += added
        if rng.random() < (0.8 if goes_on else 0.3):
            going.append(chain)
        whole = {"timestamp": 0, "input_length": PIECE * len(chain), "output_length": 1}
        lines.append(json.dumps(whole | {"hash_ids": chain}))
    path.write_text("\n".join(lines) + "\n")


def test_the_order_of_the_policies(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace")
    requests = eviction.chains_of(prompts_of(tmp_path / "trace"))
    for blocks in (100, 800):
        scores = {
            name: eviction.replay(requests, blocks, make(blocks))
            for name, make in eviction.policies(requests).items()
        }
        best, ours = scores.pop("Belady"), scores.pop("Kvass")
        for score in scores.values():
            assert score.hits < ours.hits < best.hits
            assert score.saved < ours.saved


def test_with_room_for_all_every_policy_hits_all_that_came_before(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace")
    requests = eviction.chains_of(prompts_of(tmp_path / "trace"))
    asked = sum(map(len, requests))
    distinct = len({header.key for chain in requests for header in chain})
    for make in eviction.policies(requests).values():
        score = eviction.replay(requests, distinct + 16, make(distinct + 16))
        assert score.hits == (asked - distinct) / asked


def test_without_the_trace_it_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eviction.py", "--trace", "/nowhere"])
    assert eviction.main() == 2
    said = capsys.readouterr().err
    assert "/nowhere is no file" in said and "kvcache-ai/Mooncake" in said


def test_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace")
    monkeypatch.setattr(eviction, "COST_BLOCKS", 320)
    paths = [str(tmp_path / name) for name in ("trace", "figures")]
    monkeypatch.setattr(sys, "argv", ["eviction.py", "--trace", paths[0], "--json", paths[1]])
    assert eviction.main() == 0
    figures = {each["name"]: each for each in json.loads(Path(paths[1]).read_text())}
    assert figures["Kvass, 10%: hits"]["ratio"] <= 1.0
    assert figures["Kvass: memory, a block"]["value"] > 0
    assert "S3-FIFO" in capsys.readouterr().out
