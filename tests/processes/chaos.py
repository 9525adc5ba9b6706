"""The two sides of the chaos test: clients that know the golden answers, and a saboteur that knows
whom it may hit.

At every moment one decode worker and one gateway are left in peace: without a decode worker nothing
can be answered, and with its gateway a connection dies. Store nodes and prefill workers may all be
away at once.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster import MODEL, Cluster
from cluster_control import WORDS
from crew import Crew, Seat

ANSWER_S = 60.0  # a request that takes longer hangs: four workers lost, one after the other
PAUSE_S = (1.0, 3.0)  # between two acts of sabotage
STOPPED_S = (0.5, 4.0)  # on both sides of the 3 s after which a silent member is taken for lost
AWAY_S = (0.0, 2.0)  # between a member's death and its next start
SETTLED_S = 2.0  # after which a member that is back is known as such to everybody
SPARED = ("decode", "gateway")  # roles of which only one is hit at a time
KILL_SHARE = 0.5
NOBODY = "nobody there"  # of a connection that was refused: nothing was asked yet

Said = tuple[tuple[str, str], ...]  # text and reason of the end of each choice


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same."""

    name: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A request that ended without an answer, and when."""

    name: str
    gateway: int  # its port
    kind: str
    begun_s: float
    ended_s: float


class Broken(Exception):
    """A request did not get its answer. `said` is what had come of it."""

    def __init__(self, kind: str, said: Said = ()) -> None:
        super().__init__(kind)
        self.kind = kind
        self.said = said


# --- clients --------------------------------------------------------------------------------------


def questions(chance: random.Random) -> list[Question]:
    """Return requests of every kind."""

    def words(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    shared = words(200)
    complete: dict[str, dict[str, Any]] = {
        "short": {"prompt": "The capital of France is", "max_tokens": 12},
        "some": {"prompt": words(60), "max_tokens": 24},
        "long": {"prompt": words(400), "max_tokens": 8},
        "shared": {"prompt": f"{shared} and {words(12)}", "max_tokens": 16},
        "shared too": {"prompt": f"{shared} or {words(40)}", "max_tokens": 16},
        "stop": {"prompt": "One, two, three, four, five,", "max_tokens": 24, "stop": [" ten", "z"]},
        "two": {"prompt": words(90), "max_tokens": 12, "n": 2, "temperature": 0.9, "seed": 7},
        "seed": {"prompt": words(120), "max_tokens": 40, "temperature": 1.1, "seed": 11},
        "list": {"prompt": [words(20), words(70)], "max_tokens": 10},
        "blocks": {"prompt": [chance.randrange(1000, 9000) for _ in range(128)], "max_tokens": 12},
    }
    talk = [
        {"role": "user", "content": "What is the capital of France, and why is it famous?"},
        {"role": "assistant", "content": "Paris, for its museums."},
        {"role": "user", "content": f"Go on, with: {words(30)}"},
    ]
    chat = {"chat": {"messages": talk[:1]}, "second turn": {"messages": talk}}
    return [
        *(_question(name, "/v1/completions", fields) for name, fields in complete.items()),
        *(
            _question(name, "/v1/chat/completions", fields | {"max_tokens": 20})
            for name, fields in chat.items()
        ),
    ]


def _question(name: str, path: str, fields: dict[str, Any]) -> Question:
    return Question(name, path, {"model": MODEL, "temperature": 0, "ignore_eos": True} | fields)


def ask(gateway: Cluster, question: Question, *, stream: bool = True, **fields: Any) -> Said:
    """Ask over a connection of its own; raises Broken."""
    body = dict(question.body) | fields | ({"stream": True} if stream else {})
    said: dict[int, list[str]] = {}
    try:
        with (
            httpx.Client(base_url=gateway.url, timeout=ANSWER_S, trust_env=False) as http,
            http.stream("POST", question.path, json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise Broken(f"{response.status_code} {response.text[:200]}")
            if not stream:
                return _whole(json.loads(response.read()))
            _follow(response, said)
    except httpx.ConnectError:
        raise Broken(NOBODY) from None
    except httpx.TransportError as error:
        raise Broken(f"connection: {type(error).__name__}", _joined(said)) from None
    return _joined(said)


def _whole(answer: Mapping[str, Any]) -> Said:
    return tuple(
        (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    )


def _follow(response: httpx.Response, said: dict[int, list[str]]) -> None:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if not line:
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise Broken(f"event: {event['error']}", _joined(said))
        for choice in event["choices"]:
            text, reason = said.setdefault(choice["index"], ["", ""])
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            said[choice["index"]] = [text + piece, choice["finish_reason"] or reason]
    raise Broken("connection: ended without [DONE]", _joined(said))


def _joined(said: Mapping[int, Sequence[str]]) -> Said:
    return tuple((said[index][0], said[index][1]) for index in sorted(said))


@dataclass
class Ledger:
    """What clients got. Mutable: `answered`, `failures`."""

    golden: Mapping[str, Said]
    answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def right(self, question: Question, said: Said) -> None:
        """Take an answer in; fails when it is not the golden one."""
        golden = self.golden[question.name]
        assert said == golden, f"{question.name!r}: {said}, and cold it is {golden}"
        with self._lock:
            self.answered += 1

    def broken(self, question: Question, failure: Failure, said: Said) -> None:
        """Take a broken answer in; fails when what came of it is not the golden one's beginning."""
        golden = self.golden[question.name]
        for (text, _), (whole, _) in zip(said, golden, strict=False):
            assert whole.startswith(text), (failure, said)
        with self._lock:
            self.failures.append(failure)

    def report(self) -> str:
        kinds = Counter(each.kind.partition(":")[0][:60] for each in self.failures)
        return f"chaos: {self.answered} right answers, {len(self.failures)} errors: {dict(kinds)}"


def ask_until(
    ends_s: float,
    gateways: Sequence[Cluster],
    asked: Sequence[Question],
    chance: random.Random,
    ledger: Ledger,
) -> None:
    """Ask one request after the other, each at any gateway, whole or streamed."""
    while time.monotonic() < ends_s:
        question, gateway = chance.choice(asked), chance.choice(gateways)
        begun_s = time.monotonic()
        try:
            said = ask(gateway, question, stream=chance.random() < 0.6)
        except Broken as error:
            failure = Failure(question.name, gateway.port, error.kind, begun_s, time.monotonic())
            ledger.broken(question, failure, error.said)
            time.sleep(0.2)
        else:
            ledger.right(question, said)


# --- sabotage -------------------------------------------------------------------------------------


@dataclass
class Outage:
    """A member was not there from `begun_s` to `ended_s`."""

    seat: Seat
    begun_s: float
    ended_s: float = float("inf")


class Saboteur:
    """Kills and stops members, and repairs what it did. Mutable: `outages`, `done`, `_healing`."""

    def __init__(self, members: Crew, chance: random.Random) -> None:
        self._members = members
        self._chance = chance
        self.outages: list[Outage] = []
        self.done: Counter[str] = Counter()
        self._healing: dict[str, threading.Thread] = {}

    def work(self, ends_s: float) -> None:
        """Hit somebody, again and again."""
        while time.monotonic() < ends_s:
            time.sleep(self._chance.uniform(*PAUSE_S))
            victims = [seat for seat in self._members.seats.values() if self._may_hit(seat)]
            # Drawn in any case, so that one seed draws the same whoever is there.
            choice, is_kill = self._chance.random(), self._chance.random() < KILL_SHARE
            stopped_s, away_s = self._chance.uniform(*STOPPED_S), self._chance.uniform(*AWAY_S)
            if victims:
                seat = victims[int(choice * len(victims))]
                outage = Outage(seat, time.monotonic())
                self.outages.append(outage)
                hit = (self._kill, outage, away_s) if is_kill else (self._stop, outage, stopped_s)
                self.done["killed" if is_kill else "stopped"] += 1
                thread = threading.Thread(target=hit[0], args=hit[1:], daemon=True)
                self._healing[seat.member_id] = thread
                thread.start()

    def _may_hit(self, seat: Seat) -> bool:
        role = seat.role if seat.role in SPARED else seat.member_id
        same = [each for each in self.outages if each.seat.member_id.startswith(role)]
        return all(each.ended_s + SETTLED_S < time.monotonic() for each in same)

    def _kill(self, outage: Outage, away_s: float) -> None:
        outage.seat.kill()
        time.sleep(away_s)
        outage.seat.start()
        outage.seat.until_ready()
        outage.ended_s = time.monotonic()

    def _stop(self, outage: Outage, stopped_s: float) -> None:
        outage.seat.signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        outage.seat.signal(signal.SIGCONT)
        outage.ended_s = time.monotonic()

    def repair(self) -> None:
        """Wait until everybody is back, and everybody knows."""
        for thread in self._healing.values():
            thread.join()
        assert all(outage.ended_s < float("inf") for outage in self.outages), "somebody stayed away"
        self._members.until_whole()

    def was_away(self, port: int, begun_s: float, ended_s: float) -> bool:
        """Whether the gateway at a port was away at any time between."""
        return any(
            each.seat.port == port and each.begun_s <= ended_s and begun_s <= each.ended_s
            for each in self.outages
        )

    def hits(self, role: str) -> int:
        """Return how often members of a role were killed or stopped."""
        return sum(each.seat.role == role for each in self.outages)

    def report(self) -> str:
        hit = Counter(each.seat.member_id for each in self.outages)
        return f"sabotage: {dict(self.done)}, {dict(sorted(hit.items()))}"


def is_excused(failure: Failure, saboteur: Saboteur) -> bool:
    """Whether a request may have failed: its own gateway was hit, and its connection with it."""
    lost = failure.kind == NOBODY or failure.kind.startswith("connection")
    return lost and saboteur.was_away(failure.gateway, failure.begun_s, failure.ended_s)
