"""What a store node holds and who uses it: every operation of the node, without its bytes. Pure.

It joins the parts: slots and their states (`ledger`), how blocks come into being (`puts`), leases,
holds and pins (`guards`), claims. Each call takes `now_s` and first ends what has run out. It
refuses to know about transports, memory addresses and connections.

Invariant, after every call: the ledger's conservation law; nothing leased, held or pinned is
evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvass.common.block import BlockHeader
from kvass.common.keys import SEGMENT_BLOCKS
from kvass.kvstore.eviction.policy import Eviction
from kvass.kvstore.eviction.reuse import ReuseEviction
from kvass.kvstore.index.claims import Claims
from kvass.kvstore.index.erasures import Erasures
from kvass.kvstore.index.extents import Extents
from kvass.kvstore.index.guards import Guards, Owner
from kvass.kvstore.index.leases import Lease, Leases
from kvass.kvstore.index.ledger import STATES, Entry, Ledger
from kvass.kvstore.index.puts import Move, PutOrder, Puts, Verdict
from kvass.kvstore.index.shares import Allotments, Shares, Usage

LAST_OF_SEGMENT = SEGMENT_BLOCKS - 1


@dataclass(frozen=True, slots=True)
class Barred:
    """What a bar has erased: how many `blocks`; `wrong` are all keys that are known to be wrong,
    here or elsewhere; after `ends` other nodes may have more."""

    blocks: int
    wrong: set[bytes]
    ends: list[bytes]


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares are of the slab. `epoch` is new with each start of the node."""

    epoch: str
    claim_s: float = 2.0
    hold_s: float = 60.0
    hold_share: float = 0.5
    quarantine_share: float = 0.125
    allotments: Allotments = field(default_factory=Allotments)


class Index:
    """Mutable fields: its parts, `draining` (no new puts and claims), and the counts `hits`,
    `misses`, `corrupt`, `dropped`."""

    def __init__(
        self, slab_bytes: int, limits: Limits, policy: Callable[[], Eviction] = ReuseEviction
    ) -> None:
        self.limits = limits
        self.guards = Guards(int(slab_bytes * limits.hold_share))
        shares = Shares(limits.allotments, policy)
        self.ledger = Ledger(Extents(slab_bytes), shares, self.guards.__contains__)
        self.claims = Claims(limits.claim_s)
        self.leases = Leases(self.ledger, limits.epoch)
        quarantine_bytes = int(slab_bytes * limits.quarantine_share)
        self.puts = Puts(self.ledger, self.guards, quarantine_bytes)
        self.erasures = Erasures()
        self.draining = False
        self.hits = 0
        self.misses = 0
        self.corrupt = 0
        self.dropped = 0
        self._ended: list[bytes] = []

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        self.leases.expire(now_s)
        self.puts.expire(now_s)
        self._ended.extend(self.claims.expire(now_s))
        for key in self.guards.expire(now_s):
            self.ledger.offer_key(key)

    def catch_up(self) -> None:
        """Let the eviction policies hear what happened: it need not be before a caller is
        answered."""
        self.ledger.shares.catch_up()

    def take_news(self) -> list[bytes]:
        """Return, once, the keys that became visible, or that nobody computes or writes any
        more."""
        news = [*self.ledger.news, *self._ended]
        self.ledger.news.clear()
        self._ended.clear()
        return news

    # --- probes ---

    def lookup(self, keys: Sequence[bytes], now_s: float, *, again: bool = False) -> list[bool]:
        """Say which blocks of a chain are readable. Protects nothing; makes its chain young. Those
        that are looked up `again` were counted before, as hits or misses."""
        self.expire(now_s)
        found = [self.ledger.visible(key) is not None for key in keys]
        self.ledger.touch([key for key, here in zip(keys, found, strict=True) if here])
        if not again:
            self.hits += sum(found)
            self.misses += len(found) - sum(found)
        return found

    def status(self, keys: Iterable[bytes], now_s: float) -> tuple[list[bytes], list[bytes]]:
        """Return which blocks are visible, and which nobody has, computes or writes."""
        self.expire(now_s)
        visible, unclaimed = [], []
        for key in keys:
            entry = self.ledger.entries.get(key)
            if entry is not None:
                if entry.state == "visible":
                    visible.append(key)
            elif self.claims.owner(key) is None:
                unclaimed.append(key)
        return visible, unclaimed

    # --- claims ---

    def claim(self, owner: str, keys: Sequence[bytes], now_s: float) -> list[Verdict]:
        """Claim or renew, in chain order: granted, visible, busy (somebody else's) or, while this
        node drains, elsewhere: what is computed for it could not be put here."""
        self.expire(now_s)
        return [self._claim(owner, key, now_s) for key in keys]

    def _claim(self, owner: str, key: bytes, now_s: float) -> Verdict:
        entry = self.ledger.entries.get(key)
        if entry is not None and entry.state == "visible":
            return "visible"
        if self.draining:
            return "elsewhere"
        written = entry is not None and self.claims.owner(key) is None
        if written or not self.claims.take(owner, key, now_s):
            return "busy"
        return "granted"

    def release_claims(self, owner: str, now_s: float) -> None:
        """End the owner's claims."""
        self.expire(now_s)
        self._ended.extend(self.claims.release(owner))

    # --- puts ---

    def put_begin(self, order: PutOrder, now_s: float) -> list[Verdict]:
        """Give out places for blocks; see `Puts`."""
        self.expire(now_s)
        if self.draining and not order.is_own:
            return ["visible" if self.ledger.visible(h.key) else "elsewhere" for h in order.headers]
        refused = self.erasures.refused_of(order.headers, now_s, as_of=order.as_of)
        if not refused:
            return self.puts.begin(order)
        taken = [header for header in order.headers if header.key not in refused]
        verdicts = iter(self.puts.begin(replace(order, headers=taken)))
        why: Verdict = "full" if order.as_of is None else "erased"
        return [why if h.key in refused else next(verdicts) for h in order.headers]

    def room_bytes(self, *, held: bool) -> int:
        """Return what blocks may take at most, together; for those that are held it is less."""
        total = self.ledger.extents.total
        return min(total, self.guards.cap_bytes) if held else total

    def begin_moves(
        self, put_id: str, session: str, keys: Sequence[bytes], now_s: float
    ) -> list[Move | None]:
        """Start moving a put's shares of blocks into their slots; None where the put is over."""
        self.expire(now_s)
        return self.puts.begin_moves(put_id, session, keys)

    def end_moves(
        self, moves: Sequence[Move], checksums: Sequence[Sequence[int] | None]
    ) -> list[bool]:
        """End moves of one put; `checksums` of bytes that were checked in place, or None. Returns
        of each whether it succeeded."""
        stored = self.puts.end_moves(moves, checksums)
        if len(self.claims):
            for move in moves:
                if move.entry.state == "visible":
                    self.claims.end(move.entry.header.key)
        return stored

    def end_move(self, move: Move, checksums: Sequence[int] | None) -> bool:
        """As `end_moves`, of one."""
        return self.end_moves([move], [checksums])[0]

    def put_abort(self, put_id: str, session: str, now_s: float) -> None:
        """Give up a put."""
        self.puts.abort(put_id, session)
        self.expire(now_s)

    def leave(self, session: str, now_s: float) -> None:
        """A peer's connection has ended: its unfinished puts are given up."""
        self.puts.leave(session)
        self.expire(now_s)

    # --- gets ---

    def get_begin(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        head_groups: int,
        now_s: float,
        length_s: float | None = None,
    ) -> Lease | None:
        """Lease those of `keys` that are here in this shape; None when none is.

        `length_s` overrides the measured length: the node's own transfers have a deadline.
        """
        self.expire(now_s)
        entries = [
            entry
            for entry in map(self.ledger.entries.get, keys)
            if entry is not None
            and entry.state == "visible"
            and entry.header.length == size_bytes
            and entry.head_groups == head_groups
        ]
        if not entries:
            return None
        lease = self.leases.begin(entries, now_s, length_s)
        self.ledger.touch(lease.keys)
        return lease

    def get_renew(self, lease_id: str, now_s: float) -> bool:
        """Prolong a lease; False when it is not held."""
        self.expire(now_s)
        return self.leases.renew(lease_id, now_s)

    def get_end(self, lease_id: str, now_s: float) -> bool:
        """End a lease; returns whether it was held throughout."""
        self.expire(now_s)
        return self.leases.end(lease_id, now_s)

    # --- holds and pins ---

    def release_hold(self, owner: str, now_s: float) -> None:
        """End a job's holds, for good: a put that is late holds nothing for it."""
        self.puts.end_job(owner)
        self._release(("hold", owner), now_s)

    def unhold(self, owner: str, keys: Iterable[bytes], now_s: float) -> None:
        """A job has these of its blocks, and goes on."""
        for key in self.guards.release_keys(("hold", owner), keys):
            self.ledger.offer_key(key)
        self.expire(now_s)

    def pin(self, owner: str, keys: Sequence[bytes], ends_s: float, now_s: float) -> list[bool]:
        """Keep blocks from eviction until `ends_s`; False for one that is not here or over
        quota."""
        self.expire(now_s)
        entries = [self.ledger.visible(key) for key in keys]
        return [
            entry is not None
            and self.guards.add(("pin", owner), entry.header.key, entry.header.length, ends_s)
            for entry in entries
        ]

    def unpin(self, owner: str, now_s: float) -> None:
        """End an owner's pins."""
        self._release(("pin", owner), now_s)

    def _release(self, owner: Owner, now_s: float) -> None:
        for key in self.guards.release(owner):
            self.ledger.offer_key(key)
        self.expire(now_s)

    # --- erasure ---

    def drop(
        self, matches: Callable[[BlockHeader], bool], now_s: float, *, bars: bool = False
    ) -> int:
        """Erase blocks, written and being written; what is leased stays readable to its readers
        only. Copies of them that are still under way are not taken; with `bars`, none for a while.

        Returns how many went.
        """
        self.expire(now_s)
        self.erasures.mark(matches, now_s, bars=bars)
        chosen = [entry for entry in self.ledger.entries.values() if matches(entry.header)]
        for entry in chosen:
            self._erase(entry)
        self.dropped += len(chosen)
        return len(chosen)

    def bar(self, writer: str, after: Iterable[bytes], now_s: float) -> Barred:
        """Erase a writer's blocks and what was computed upon them, or upon the blocks `after`,
        which are elsewhere. That nothing more of his is taken is `erasures.bar`'s."""
        wrong = set(after)
        entries = sorted(self.ledger.entries.values(), key=lambda entry: entry.header.index)
        for entry in entries:
            if entry.header.writer == writer or entry.header.parent in wrong:
                wrong.add(entry.header.key)
        ends = [
            entry.header.key
            for entry in entries
            if entry.header.key in wrong and entry.header.index % SEGMENT_BLOCKS == LAST_OF_SEGMENT
        ]
        blocks = self.drop(lambda h: h.key in wrong or h.writer == writer, now_s, bars=True)
        return Barred(blocks, wrong, ends)

    def found_corrupt(self, entry: Entry, now_s: float) -> None:
        """The bytes of a visible block are not what they were: nobody finds it any more."""
        self.corrupt += 1
        if self.ledger.visible(entry.header.key) is entry:
            self._erase(entry)
        self.expire(now_s)

    def _erase(self, entry: Entry) -> None:
        if entry.state == "writing":
            self.puts.give_up(entry)
        else:
            self.guards.forget(entry.header.key)
            self.ledger.remove(entry)

    # --- counts ---

    def usage(self) -> Mapping[str, Usage]:
        """Return what each tenant has of the slab; the tenant of public blocks is empty."""
        return self.ledger.shares.used

    def counts(self) -> dict[str, int]:
        """Return every count under its name; `*_bytes` of the five states sum to `total_bytes`."""
        ledger = self.ledger
        return {
            "total_bytes": ledger.extents.total,
            "free_bytes": ledger.extents.free_bytes,
            **{f"{state}_bytes": ledger.sizes[state] for state in STATES},
            **{f"{state}_blocks": ledger.blocks[state] for state in STATES},
            "held_bytes": self.guards.bytes_of("hold"),
            "pinned_bytes": self.guards.bytes_of("pin"),
            "guarded_bytes": self.guards.size_bytes,
            "guard_cap_bytes": self.guards.cap_bytes,
            "quarantine_cap_bytes": self.puts.quarantine_cap_bytes,
            "leases": len(self.leases),
            "leases_lost": self.leases.lost,
            "claims": len(self.claims),
            "puts": len(self.puts),
            "hits": self.hits,
            "misses": self.misses,
            "stored": ledger.stored,
            "evictions": ledger.evictions,
            "quota_evictions": ledger.quota_evictions,
            "relocated": ledger.relocated,
            "over_quota": ledger.over_quota,
            "tenants": len(ledger.shares.used),
            "corrupt": self.corrupt,
            "dropped": self.dropped,
            "erased_refused": self.erasures.refused,
            "barred_writers": self.erasures.barred_count,
        }
