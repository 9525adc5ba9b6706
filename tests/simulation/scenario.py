"""What one seed stands for: a cluster, what its clients ask, and what goes wrong. Pure.

Everything that is drawn before a run is drawn here; what is drawn while it runs (which transfer
fails, how long a frame takes) has generators of its own, made from the same seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from hash_model import BLOCK, VOCABULARY
from kvass.common.transport.route import Setting

Kind = Literal["kill", "hang", "cut", "split", "drop", "drain", "join", "erase", "crowd"]
Weather = Literal["calm", "rough"]

PATIENCE_S = 400.0  # of a client that waits for its answer, whatever happens
FLASH_SLAB = 24  # blocks of memory at most beside a second tier
CHAOS_S = 12.0  # mishaps begin within this; the first requests come within a second


@dataclass(frozen=True, slots=True)
class Member:
    """One store node or worker. `size`: blocks of its slab or pool; `step_s`: of a worker;
    `late`: it is not there before it joins."""

    member_id: str
    size: int
    setting: Setting
    landing_bytes: int
    host: str
    step_s: float = 0.0
    chunk_blocks: int = 4
    batch: int = 4
    queue: int = 64
    tokens_per_s: float = 1.0  # what it believes that computing costs: so slow that loading pays
    late: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the client adds to the conversation, and how long an answer it wants."""

    tokens: tuple[int, ...]
    count: int
    choices: int = 1
    patience_s: float = PATIENCE_S
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after the other; each prompt is everything before and the turn's tokens."""

    name: str
    start_s: float
    salt: bytes
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Mishap:
    """`kill`: back after `lasts_s`, as a new process. `hang`: for `lasts_s`. `cut`: every
    connection of the member. `split`: it sees other nodes than the others do, for `lasts_s`.
    `drop`: within that time, what is being read from a node is erased everywhere; `erase`: so is
    what a worker wrote, or a model's, at once. `drain`: a node hands over, leaves, and is back
    after `lasts_s`. `join`: a late node comes. `crowd`: many look up what a node has."""

    at_s: float
    kind: Kind
    member_id: str
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`answers_due`: the decode workers stay well enough that no request may end in an error.
    `flash`: store nodes have a second tier, whose disk outlives them. `audits`: idle prefill
    workers look at what others stored."""

    seed: int
    window: int
    claim_s: float
    hold_s: float
    prefill_tokens_min: int
    replicas: int
    stores: tuple[Member, ...]
    prefills: tuple[Member, ...]
    decodes: tuple[Member, ...]
    conversations: tuple[Conversation, ...]
    mishaps: tuple[Mishap, ...]
    weather: Weather
    answers_due: bool
    flash: bool
    audits: bool


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    window = rng.choice([64, 96, 160, 320])
    setting: Setting = rng.choice(["auto", "auto", "tcp"])
    hosts = [f"host-{n}" for n in range(rng.choice([1, 1, 2, 3]))]
    level = rng.choice(["calm", "rough", "mishaps", "all", "all"])
    stores = _stores(rng, setting, hosts, mishaps=level in ("mishaps", "all"))
    prefills = tuple(
        _worker(rng, f"prefill-{n}", window, hosts) for n in range(rng.choice([0, 1, 1, 2]))
    )
    decodes = tuple(
        _worker(rng, f"decode-{n}", window, hosts) for n in range(rng.choice([1, 2, 2]))
    )
    mishaps = _mishaps(rng, stores, prefills, decodes) if level in ("mishaps", "all") else ()
    flash = random.Random(f"flash {seed}").random() < 0.4
    if flash:  # what memory holds does not come back from there
        stores = tuple(replace(each, size=min(each.size, FLASH_SLAB)) for each in stores)
    luck = random.Random(f"audits {seed}")
    audits = luck.random() < 0.5
    if audits and len(prefills) == 1:  # one alone finds only what decode workers have stored
        prefills += (_worker(luck, "prefill-1", window, hosts),)
    hurt = {m.member_id for m in mishaps if m.kind != "split"}
    return Scenario(
        seed=seed,
        window=window,
        claim_s=rng.choice([0.5, 2.0]),
        hold_s=rng.choice([5.0, 60.0]),
        prefill_tokens_min=rng.choice([BLOCK, 4 * BLOCK]),
        replicas=rng.choice([1, 1, 2, 2, 2, 3]),
        stores=stores,
        prefills=prefills,
        decodes=decodes,
        conversations=_conversations(rng, window),
        mishaps=mishaps,
        weather="rough" if level in ("rough", "all") else "calm",
        answers_due=any(each.member_id not in hurt for each in decodes),
        flash=flash,
        audits=audits,
    )


def _stores(
    rng: random.Random, setting: Setting, hosts: list[str], *, mishaps: bool
) -> tuple[Member, ...]:
    count = rng.choice([1, 2, 2, 3, 4])
    late = count + (rng.choice([0, 1]) if mishaps else 0)
    size = rng.choice([0, 32, 96])  # alike, so that each has room for the others' copies; 0: not
    return tuple(
        Member(
            member_id=f"store-{number}",
            size=size or rng.choice([6, 12, 32, 96, 256]),
            setting=rng.choice([setting, setting, "auto"]),
            landing_bytes=rng.choice([1 << 15, 1 << 17]),
            host=rng.choice(hosts),
            late=number >= count,
        )
        for number in range(late)
    )


def _worker(rng: random.Random, member_id: str, window: int, hosts: list[str]) -> Member:
    return Member(
        host=rng.choice(hosts),
        member_id=member_id,
        # As `pool_slots`: never less than the longest request and one slot more.
        size=window // BLOCK + 1 + rng.choice([0, 0, 0, 8, 48]),
        setting=rng.choice(["auto", "auto", "auto", "tcp"]),
        landing_bytes=rng.choice([1 << 15, 1 << 17]),
        step_s=rng.choice([0.002, 0.02, 0.1]),
        chunk_blocks=rng.choice([1, 4, 16]),
        batch=rng.choice([2, 4, 8]),
        tokens_per_s=rng.choice([1.0, 1.0, 50.0, 1e9]),
    )


def _conversations(rng: random.Random, window: int) -> tuple[Conversation, ...]:
    families = [_tokens(rng, window) for _ in range(rng.choice([1, 2, 3]))]
    salts = [b"", rng.randbytes(32)]
    drawn = []
    for number in range(rng.randrange(5, 12)):
        start_s = rng.choice([0.0, rng.random(), 10 * rng.random()])
        salt = rng.choice([*salts, salts[0], rng.randbytes(32)])
        name = f"c{number}"
        drawn.append(Conversation(name, start_s, salt, _turns(rng, window, families)))
    return tuple(drawn)


def _turns(rng: random.Random, window: int, families: list[tuple[int, ...]]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    length = _length(rng, window * 3 // 4)
    shared = rng.choice(families)[: rng.choice([length, length, length // 2])]
    tokens = (*shared, *_tokens(rng, length - len(shared)))
    left = window
    for _ in range(rng.choice([1, 1, 2, 3])):
        count = rng.choice([1, 2, BLOCK, 10, rng.randrange(1, 40)])
        if len(tokens) + count > left:
            break
        left -= len(tokens) + count
        impatient = rng.random() < 0.2
        turns.append(
            Turn(
                tokens=tokens,
                count=count,
                choices=rng.choice([1, 1, 1, 2, 3]),
                patience_s=rng.choice([0.0, 0.01, 0.1, 1.0, 5.0]) * rng.random()
                if impatient
                else PATIENCE_S,
                think_s=rng.choice([0.0, rng.random(), 3 * rng.random()]),
            )
        )
        tokens = _tokens(rng, rng.choice([1, BLOCK - 1, BLOCK, 11]))
    return tuple(turns) or (Turn(tokens=shared[:BLOCK] or (0,), count=1),)


def _length(rng: random.Random, most: int) -> int:
    blocks = rng.randrange(0, most // BLOCK)
    return max(1, min(most, blocks * BLOCK + rng.choice([0, 1, -1, rng.randrange(BLOCK)])))


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def _mishaps(
    rng: random.Random,
    stores: tuple[Member, ...],
    prefills: tuple[Member, ...],
    decodes: tuple[Member, ...],
) -> tuple[Mishap, ...]:
    # One decode worker stays well where there are two, and the other one is hurt twice at most: so
    # every request has an attempt left.
    targets = [each.member_id for each in (*stores, *prefills)] * 2
    drawn = [_mishap(rng, rng.choice(targets)) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.6:
        victim = decodes[-1].member_id
        drawn += [_mishap(rng, victim) for _ in range(rng.choice([1, 1, 2]))]
    drawn += [_of_kind(rng, "join", each.member_id) for each in stores if each.late]
    return tuple(sorted(drawn, key=lambda mishap: mishap.at_s))


def _mishap(rng: random.Random, member_id: str) -> Mishap:
    kinds: list[Kind] = ["kill", "kill", "hang", "cut", "split"]
    if member_id.startswith("store"):
        kinds += ["drop", "drain", "drain", "erase", "crowd"]
    return _of_kind(rng, rng.choice(kinds), member_id)


def _of_kind(rng: random.Random, kind: Kind, member_id: str) -> Mishap:
    at_s = rng.choice([rng.random(), 4 * rng.random(), CHAOS_S * rng.random()])
    return Mishap(at_s, kind, member_id, rng.choice([0.3, 2.0, 6.0, 12.0]) * rng.random())
