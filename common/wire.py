"""Messages between gateway and workers, and how any message becomes bytes and back. Pure.

Bytes are msgpack with every length bounded before anything is built; types are checked by msgspec
against the classes here, found through an explicit tag table. A class name never crosses the wire,
and no pickle does. The store's own messages are in `kvstore/messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from kvass.common.errors import Invalid
from kvass.common.keys import KEY_BYTES

PROTOCOL_VERSION = 7
# A prompt of 131,072 tokens is 0.6 MB of msgpack, and the largest `lookup` 4.7 MB.
FRAME_BYTES_MAX = 8 << 20
ITEMS_MAX = 1 << 20
ENTRIES_MAX = 4096  # of a map: the largest is a `logit_bias`
# Arrays and maps in one value. The largest `lookup` has 4,097; its answer, of 131,072 blocks of
# which every other one is there, 65,537. An empty one is a byte on the wire and 56 in memory.
CONTAINERS_MAX = 1 << 17

# Numbers and texts as they may come from anywhere. msgpack knows no integer of more than 64 bits.
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
# What may be part of a topic, and of a line in a log.
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Name = Annotated[str, Meta(max_length=256)]  # of an owner, tenant, job or writer
Text = Annotated[str, Meta(max_length=4_096)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Facts = Annotated[dict[Name, Integer | Finite | Text], Meta(max_length=256)]  # of a member
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Tokens = Annotated[tuple[TokenId, ...], Meta(max_length=ITEMS_MAX)]
Position = Annotated[int, Meta(ge=0, le=1 << 24)]  # sixteen times the most tokens of a message

Range = tuple[Position, Position]  # half-open, of block indices or token positions
Ranges = Annotated[tuple[Range, ...], Meta(max_length=1 << 16)]  # every other block of 131,072
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Salted = Annotated[bytes, Meta(max_length=64)]  # BLAKE2b takes no longer key
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]

Reply = TypeVar("Reply", bound="Message")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Root of everything that crosses the wire; concrete classes set `tag`."""


class Request(Message, Generic[Reply], frozen=True):
    """A message that is answered: by one `Reply`, or by a stream of them.

    `followed_by`: what its caller sends after it, once, while the call is under way; most calls
    have no such thing.
    """

    followed_by: ClassVar[type[Message] | None] = None


class Done(Message, frozen=True, tag="done"):
    """The answer of a call that has nothing to say."""


class Tags:
    """An explicit table of the message classes that one listener accepts, or one caller expects."""

    def __init__(self, classes: Iterable[type[Message]]) -> None:
        self._classes: dict[str, type[Message]] = {}
        for cls in classes:
            tag = cls.__struct_config__.tag
            assert isinstance(tag, str) and tag not in self._classes, f"tag {tag!r} is taken"
            self._classes[tag] = cls

    def decode(self, value: object) -> Message:
        """Turn an unpacked map into a message; raises Invalid with the field that was wrong."""
        if not isinstance(value, dict):
            raise Invalid(f"a message must be a map; got {type(value).__name__}")
        tag = value.get("t")
        cls = self._classes.get(tag) if isinstance(tag, str) else None
        if cls is None:
            known = ", ".join(self._classes)
            raise Invalid(f"unknown message {repr(tag)[:64]}; known: {known}")
        try:
            # bytes are bytes on the wire: text that looks like base64 is not taken for them.
            return msgspec.convert(value, cls, str_keys=True, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise Invalid(f"message {value['t']!r}: {error}") from None


def pack(value: object) -> bytes:
    """Encode plain values and messages as msgpack."""
    # msgpack readers refuse map keys that are not strings; `decode` turns them back.
    plain = msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True)
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Decode one msgpack value, its lengths and its containers' number bounded; raises Invalid."""
    left = CONTAINERS_MAX

    def counted(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {CONTAINERS_MAX} arrays and maps")
        return container

    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_bin_len=FRAME_BYTES_MAX,
            max_str_len=FRAME_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=ENTRIES_MAX,
            max_ext_len=0,
            list_hook=counted,
            object_hook=counted,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Invalid(f"not a msgpack frame: {error}") from None


# --- gateway -> prefill ---------------------------------------------------------------------------


class PrefillProgress(Message, frozen=True, tag="prefill_progress"):
    """A prefill job's state; the last one of a stream has `done` set.

    `computed`: token ranges whose KV this job computed so far. On the last message, `missing` lists
    block ranges that could not be put into the store (decode computes them).
    """

    computed: Ranges
    missing: Ranges = ()
    done: bool = False


class Prefill(Request[PrefillProgress], frozen=True, tag="prefill"):
    """Make the full blocks of `tokens` exist in the store; answered by a stream of progress.

    `hold_owner`: committed blocks are held under this name until it is released (by decode, once it
    has pulled them), or for the nodes' `store.hold_s`. Idempotent; cancelling it loses nothing but
    time.
    """

    job_id: Name
    tokens: Tokens
    hold_owner: Name
    deadline_s: Seconds  # from receipt
    salt: Salted = b""
    tenant: Name = ""
    priority: Integer = 0  # lower is sooner


# --- gateway -> decode ----------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose each next token, within what the sampler can compute for any logits."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Share = 1.0
    top_k: TokenId = 0  # 0: off
    min_p: Share = 0.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    choice: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # which of `n`: enters the random counter
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[dict[TokenId, Penalty], Meta(max_length=ENTRIES_MAX)] = {}


STOPS_MAX = 1024  # OpenAI's API takes four; the gateway says how many ours does
StopString = Annotated[str, Meta(max_length=1 << 16)]


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to stop."""

    max_tokens: Position
    strings: Annotated[tuple[StopString, ...], Meta(max_length=STOPS_MAX)] = ()
    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOPS_MAX)] = ()
    min_tokens: Position = 0
    ignore_eos: bool = False
    include_stop_string: bool = False


class Delta(Message, frozen=True, tag="delta"):
    """What a stream adds: token ids, and the text that they complete (possibly none yet).

    The last message of a stream has `finish_reason` ("stop" or "length") and the token ranges of
    the prompt whose KV decode computed itself.
    """

    token_ids: Tokens = ()
    text: Annotated[str, Meta(max_length=ITEMS_MAX)] = ""
    finish_reason: Name = ""
    computed: Ranges = ()
    stop_reason: StopString | TokenId = ""  # the stop string or token that ended it, if one did


class Generate(Request[Delta], frozen=True, tag="generate"):
    """Decode from `tokens`; answered by a stream of Delta.

    `tokens[prompt_length:]` were generated by a worker that died: decoding goes on after them, and
    `stop.max_tokens` counts them. Of their text the client has `text_sent` characters; what the
    dead worker held back beyond them is sent again. `prefill_pending` says that a prefill job is
    filling the store for this request: decode pulls what appears until `PrefillOver` comes, then
    computes what is missing itself.
    """

    request_id: Name
    tokens: Tokens
    prompt_length: Position
    sampling: Sampling
    stop: Stop
    deadline_s: Seconds  # from receipt
    text_sent: Natural = 0
    prefill_pending: bool = False
    hold_owner: Name = ""  # released in the store once the prompt's blocks are pulled
    salt: Salted = b""
    tenant: Name = ""
    priority: Integer = 0


class PrefillOver(Request[Done], frozen=True, tag="prefill_over"):
    """The prefill job of `request_id` has ended, well or not: no more blocks will come."""

    request_id: Name


# --- any member -----------------------------------------------------------------------------------


KEYS_MAX = 1 << 17  # sixteen of the longest prompts foreseen


class Forget(Request[Done], frozen=True, tag="forget"):
    """Drop blocks from a worker's own pool: those named, or all unreferenced ones."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=KEYS_MAX)] = ()


WORKER_REQUESTS: tuple[type[Message], ...] = (Prefill, Generate, PrefillOver, Forget)
WORKER_REPLIES: tuple[type[Message], ...] = (PrefillProgress, Delta, Done)
