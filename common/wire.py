"""Messages between gateway and workers, and how any message becomes bytes and back. Pure.

Bytes are msgpack with every length bounded before anything is built; types are checked by msgspec
against the classes here, found through an explicit tag table. A class name never crosses the wire,
and no pickle does. The store's own messages are in `kvstore/messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Generic, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from kvass.common.errors import Invalid

PROTOCOL_VERSION = 1
# A prompt of 131,072 tokens is 0.6 MB of msgpack and its keys 0.26 MB; 16 MiB leaves room for an
# NIXL agent's metadata and for the largest `put_begin`.
FRAME_BYTES_MAX = 16 << 20
ITEMS_MAX = 1 << 20

Range = tuple[int, int]  # half-open, of block indices or token positions: the field says which
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Salted = Annotated[bytes, Meta(max_length=64)]  # BLAKE2b takes no longer key
Blocks = Annotated[int, Meta(ge=0, le=ITEMS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]

Reply = TypeVar("Reply", bound="Message")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Root of everything that crosses the wire; concrete classes set `tag`."""


class Request(Message, Generic[Reply], frozen=True):
    """A message that is answered: by one `Reply`, or by a stream of them."""


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
        cls = self._classes.get(str(value.get("t")))
        if cls is None:
            raise Invalid(f"unknown message {value.get('t')!r}; known: {', '.join(self._classes)}")
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
    """Decode one msgpack value with every length bounded; raises Invalid."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_bin_len=FRAME_BYTES_MAX,
            max_str_len=FRAME_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=4096,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Invalid(f"not a msgpack frame: {error}") from None


# --- gateway -> prefill ---------------------------------------------------------------------------


class PrefillProgress(Message, frozen=True, tag="prefill_progress"):
    """A prefill job's state; the last one of a stream has `done` set.

    `visible_blocks`: leading blocks of the chain now in the store. `computed`: token ranges whose
    KV this job computed so far. On the last message, `missing` lists block ranges that could not
    be put into the store (decode computes them).
    """

    visible_blocks: int
    computed: tuple[Range, ...]
    missing: tuple[Range, ...] = ()
    done: bool = False


class Prefill(Request[PrefillProgress], frozen=True, tag="prefill"):
    """Make the full blocks of `tokens` exist in the store; answered by a stream of progress.

    `hold_owner`: committed blocks are held under this name until it is released (by decode, once it
    has pulled them), or for the nodes' `store.hold_s`. Idempotent; cancelling it loses nothing but
    time.
    """

    job_id: str
    tokens: tuple[int, ...]
    hold_owner: str
    deadline_s: Seconds  # from receipt
    salt: Salted = b""
    public_blocks: Blocks = 0
    tenant: str = ""
    priority: int = 0  # lower is sooner


# --- gateway -> decode ----------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose each next token, within what the sampler can compute for any logits."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: off
    min_p: Share = 0.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    choice: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # which of `n`: enters the random counter
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: dict[Annotated[int, Meta(ge=0)], Penalty] = {}


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to stop."""

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_string: bool = False


class Delta(Message, frozen=True, tag="delta"):
    """What a stream adds: token ids, and the text that they complete (possibly none yet).

    The last message of a stream has `finish_reason` ("stop" or "length") and the token ranges of
    the prompt whose KV decode computed itself.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    computed: tuple[Range, ...] = ()
    stop_reason: str = ""  # the stop string or token that ended it, if one did


class Generate(Request[Delta], frozen=True, tag="generate"):
    """Decode from `tokens`; answered by a stream of Delta.

    `tokens[prompt_length:]` were generated by a worker that died: decoding goes on after them, and
    `stop.max_tokens` counts them. Of their text the client has `text_sent` characters; what the
    dead worker held back beyond them is sent again. `prefill_pending` says that a prefill job is
    filling the store for this request: decode pulls what appears until `PrefillOver` comes, then
    computes what is missing itself.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    stop: Stop
    deadline_s: Seconds  # from receipt
    text_sent: int = 0
    prefill_pending: bool = False
    hold_owner: str = ""  # released in the store once the prompt's blocks are pulled
    salt: Salted = b""
    public_blocks: Blocks = 0
    tenant: str = ""
    priority: int = 0


class PrefillOver(Request[Done], frozen=True, tag="prefill_over"):
    """The prefill job of `request_id` has ended, well or not: no more blocks will come."""

    request_id: str


# --- any member -----------------------------------------------------------------------------------


class Forget(Request[Done], frozen=True, tag="forget"):
    """Drop blocks from a worker's own pool: those named, or all unreferenced ones."""

    keys: tuple[bytes, ...] = ()


WORKER_REQUESTS: tuple[type[Message], ...] = (Prefill, Generate, PrefillOver, Forget)
WORKER_REPLIES: tuple[type[Message], ...] = (PrefillProgress, Delta, Done)
