"""What clients are answered, in OpenAI's shape: bodies, stream chunks, errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvass.common import errors
from kvass.gateway.ask import ContextTooLong

JSON = dict[str, object]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost. `cached_tokens`: prompt tokens whose KV was not computed for it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def body(self) -> JSON:
        """Return the API's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Piece:
    """Text of one choice, new since the last piece of it. All fields but `index` change."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: str = ""
    stop_reason: str | int = ""  # the stop string, or the stop token's id


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks and the body of one answer share."""

    answer_id: str
    created_s: int
    model: str
    chat: bool
    include_usage: bool = False

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> JSON:
        """Build the body of an answer that is not streamed; `pieces` has one for each choice."""
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind, [self._choice(p) for p in pieces]) | {"usage": usage.body()}

    def opening(self, choices: int, echoes: Sequence[str]) -> list[JSON]:
        """Build what a stream starts with: the role in chat, the echoed prompts where asked for."""
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            return [self._chunk(index, {"delta": delta}) for index in range(choices)]
        return [self._chunk(index, {"text": text}) for index, text in enumerate(echoes) if text]

    def chunks(self, piece: Piece) -> list[JSON]:
        """Build the chunks of one piece: none while its text is incomplete."""
        if not self.chat:
            if not piece.text and not piece.finish_reason:
                return []
            return [self._chunk(piece.index, {"text": piece.text}, piece)]
        made = []
        if piece.text:
            made.append(self._chunk(piece.index, {"delta": {"content": piece.text}}))
        if piece.finish_reason:
            made.append(self._chunk(piece.index, {"delta": {}}, piece))
        return made

    def usage_chunk(self, usage: Usage) -> JSON:
        """Build the last chunk of a stream that asked for its usage."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._frame(kind, []) | {"usage": usage.body()}

    def _choice(self, piece: Piece) -> JSON:
        content: JSON = {"text": piece.text}
        if self.chat:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            content = {"message": message}
        return {"index": piece.index} | content | _end(piece)

    def _chunk(self, index: int, content: JSON, piece: Piece | None = None) -> JSON:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        chunk = self._frame(kind, [{"index": index} | content | _end(piece)])
        return chunk | {"usage": None} if self.include_usage else chunk

    def _frame(self, kind: str, choices: list[JSON]) -> JSON:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def _end(piece: Piece | None) -> JSON:
    reason = (piece.finish_reason or None) if piece is not None else None
    end: JSON = {"logprobs": None, "finish_reason": reason}
    if piece is not None and piece.stop_reason != "":
        end["stop_reason"] = piece.stop_reason  # vLLM's extension
    return end


def models(name: str, created_s: int, window: int) -> JSON:
    """Build the body of GET /v1/models."""
    return {"object": "list", "data": [model(name, created_s, window)]}


def model(name: str, created_s: int, window: int) -> JSON:
    """Build one model's entry; `max_model_len` is vLLM's extension."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvass",
        "root": name,
        "parent": None,
        "max_model_len": window,
    }


_TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "unavailable",
    504: "timeout",
}


def error_body(
    status: int, message: str, *, parameter: str | None = None, code: str | None = None
) -> JSON:
    """Build an error in OpenAI's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = {"message": message, "type": kind, "param": parameter}
    return {"error": detail | {"code": code or _CODES.get(status)}}


def of_error(error: errors.KvassError) -> tuple[int, JSON, dict[str, str]]:
    """Return the status, body and extra headers of the answer to a failed request."""
    parameter = error.parameter if isinstance(error, errors.Invalid) else None
    code = None
    if error.http_status == 404 and parameter == "model":
        code = "model_not_found"
    elif isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif error.http_status == 503:
        headers["Retry-After"] = "1"
    elif error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return (
        error.http_status,
        error_body(error.http_status, str(error), parameter=parameter, code=code),
        headers,
    )


def encode(body: JSON) -> bytes:
    """Write a body as JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def event(body: JSON) -> bytes:
    """Write a body as one server-sent event."""
    return b"data: " + encode(body) + b"\n\n"
