"""From token ids to the text a client may see, and to the end of an answer. Pure.

One `TextStream` an answer. Tokens become bytes, bytes become characters as soon as they are whole,
and characters are released unless a stop string could still begin with them. However a text is cut
into tokens, the pieces joined are the same: the whole text up to the stop string that is complete
first (of several complete at one character, the longest).

It refuses to know the model, the batch and the wire. Bytes that no character is made of become
U+FFFD, as in `tokenizers`; an answer that ends within a character ends before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from kvass.common.errors import Invalid
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.wire import Stop

CHARACTER_BYTES_MAX = 4  # of UTF-8


@dataclass(frozen=True, slots=True)
class Step:
    """What one token adds: text (possibly none) and, for the last one, why the answer ends."""

    text: str = ""
    finish_reason: str = ""  # "stop" or "length"
    stop_reason: str | int = ""  # the stop string, or the stop token's id; empty for EOS


class TextStream:
    """One answer's text.

    Mutable fields: `_bytes` (a decoder with the bytes of an unfinished character), `_at_start` (no
    text comes before: sentencepiece drops a leading space there), `_resumes_character` (the prompt
    ends in half a character), `_stops`, `_count` (tokens generated), `_unsent_skip` (characters
    that the client has already), `_is_over`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int],
        stop: Stop,
        eos_token_ids: frozenset[int],
        generated: Sequence[int] = (),
        text_sent: int | None = None,
    ) -> None:
        """`prompt_tail`: the prompt, or its last tokens, of which one has text if any has (8 do).

        `generated`: tokens of a resumed answer; of their text the client has `text_sent` characters
        (None: all that was released). What it lacks, and the end if they reach one, is `replayed`.
        """
        self._tokenizer = tokenizer
        self._stop = stop
        self._eos = frozenset() if stop.ignore_eos else eos_token_ids
        self._stop_tokens = frozenset(stop.token_ids)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._stops = _StopStrings(stop.strings, included=stop.include_stop_string)
        self._count = 0
        self._unsent_skip = 0
        self._is_over = False
        self._seed(prompt_tail)
        self._resumes_character = self._bytes.getstate()[0] != b""
        self.replayed = self._replay(generated, text_sent)

    def push(self, token: int) -> Step:
        """Take the next token; returns the text that is certain now, and the end if it is one."""
        assert not self._is_over, "the answer has ended"
        self._count += 1
        may_stop = self._count > self._stop.min_tokens
        is_eos = may_stop and token in self._eos
        is_stop = may_stop and token in self._stop_tokens
        is_shown = not is_eos and (not is_stop or self._stop.include_stop_string)
        text, matched = self._stops.feed(self._text(token) if is_shown else "", may_stop=may_stop)
        if matched:
            return self._end(text, "stop", matched)
        if is_eos or is_stop:
            return self._end(text + self._stops.flush(), "stop", "" if is_eos else token)
        if self._count >= self._stop.max_tokens:
            return self._end(text + self._stops.flush(), "length", "")
        return Step(self._unsent(text))

    def _end(self, text: str, finish_reason: str, stop_reason: str | int) -> Step:
        self._is_over = True
        return Step(self._unsent(text), finish_reason, stop_reason)

    def _unsent(self, text: str) -> str:
        skipped = min(self._unsent_skip, len(text))
        self._unsent_skip -= skipped
        return text[skipped:]

    def _seed(self, prompt_tail: Sequence[int]) -> None:
        """Take over the half of a character that the prompt ends with, if it does."""
        tail = b""
        for token in reversed(prompt_tail):
            tail = self._token_bytes(token) + tail
            if len(tail) >= CHARACTER_BYTES_MAX:
                break
        self._at_start = not tail
        self._bytes.decode(tail)

    def _replay(self, generated: Sequence[int], text_sent: int | None) -> Step:
        released, last = "", Step()
        for token in generated:
            last = self.push(token)
            released += last.text
            if self._is_over:
                break
        sent = len(released) if text_sent is None else text_sent
        self._unsent_skip = max(0, sent - len(released))
        return Step(released[sent:], last.finish_reason, last.stop_reason)

    def _text(self, token: int) -> str:
        """Return the characters that this token completes."""
        piece = self._token_bytes(token)
        if not piece:
            return ""
        if self._at_start and self._loses_space(token, piece):
            piece = piece[1:]
        if self._resumes_character and not 0x80 <= piece[0] < 0xC0:
            self._bytes.reset()  # the prompt's half stays one: nothing of it is in this answer
        self._at_start = self._resumes_character = False
        return self._bytes.decode(piece)

    def _loses_space(self, token: int, piece: bytes) -> bool:
        """Whether the tokenizer drops this piece's leading space where it begins a text."""
        rest = piece[1:].decode(errors="replace")
        return piece[:1] == b" " and self._tokenizer.decode([token]) == rest

    def _token_bytes(self, token: int) -> bytes:
        """Special tokens have no text; nor have ids that only pad the model's vocabulary."""
        if self._tokenizer.is_special(token):
            return b""
        try:
            return self._tokenizer.token_bytes(token)
        except Invalid:
            return b""


class _Needle:
    """One stop string and how much of it the text so far ends with: Knuth, Morris and Pratt.

    Mutable field: `matched`.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0]  # of each prefix: its longest proper prefix that is its suffix too
        for character in text[1:]:
            length = self._borders[-1]
            while length and text[length] != character:
                length = self._borders[length - 1]
            self._borders.append(length + (text[length] == character))

    def feed(self, character: str) -> bool:
        """Take one character; returns whether it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[-1]
        return True


class _StopStrings:
    """Holds back exactly what could still become a stop string. Mutable field: `_held`."""

    def __init__(self, strings: Sequence[str], *, included: bool) -> None:
        self._needles = [_Needle(text) for text in sorted(set(strings), key=len, reverse=True)]
        self._included = included
        self._held = ""

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, str]:
        """Add text; returns what is released and the stop string that ends it, or "".

        Not `may_stop`: a stop string that this text completes is text like any other.
        """
        if not self._needles:
            return text, ""
        start, self._held = len(self._held), self._held + text
        for end, character in enumerate(text, start + 1):
            complete = [needle.text for needle in self._needles if needle.feed(character)]
            if complete and may_stop:
                longest = complete[0]
                released = self._held[: end if self._included else end - len(longest)]
                self._held = ""
                return released, longest
        kept = len(self._held) - max(needle.matched for needle in self._needles)
        released, self._held = self._held[:kept], self._held[kept:]
        return released, ""

    def flush(self) -> str:
        """Release what is held: no more text comes."""
        held, self._held = self._held, ""
        return held
