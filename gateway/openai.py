"""What clients may ask, in OpenAI's shape: request schemas and their validation.

It knows every field that the API and vLLM's extensions of it have, and sorts them: supported;
ignored because no answer depends on it (`user`, `store`, `service_tier`, unknown fields too, as
vLLM does); or refused because ignoring it would change the answer. It refuses to know the model:
windows, tokens and templates are `ask.py`'s. Nothing is sent anywhere before all of this passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvass.common.errors import Invalid
from kvass.common.keys import TOKEN_ID_MAX

CHOICES_MAX = 128  # OpenAI's bound for n
PROMPTS_MAX = 2048  # OpenAI's bound for a list of prompts
STOP_STRINGS_MAX = 16  # OpenAI allows 4, vLLM any number; each costs a search in every delta
STOP_CHARACTERS_MAX = 1024  # a stop string's length is how much text it can hold back
STOP_TOKENS_MAX = 256
BIASES_MAX = 1024  # OpenAI's practice is 300; the wire allows maps of 4,096

Prompt = str | list[int]


def _fail(message: str, *, field: str = "") -> PydanticCustomError:
    """Return what a validator raises; `field` is named where the form as a whole is checked."""
    return PydanticCustomError("kvass", "{reason}", {"reason": message, "field": field})


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list):
        raise _fail("expected a list of token ids")
    for item in value:
        if type(item) is not int or not 0 <= item <= TOKEN_ID_MAX:
            raise _fail(f"expected token ids (integers from 0); got {item!r:.40}")
    return value


def _prompts(value: object) -> list[Prompt]:
    """Sort out the four forms of a prompt; a list is never empty."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _fail(
            "expected a string, a list of strings, a list of token ids or a list of such lists"
        )
    if not value:
        raise _fail("the list is empty: expected at least one prompt or token id")
    if isinstance(value[0], int):
        return [_token_ids(value)]
    if len(value) > PROMPTS_MAX:
        raise _fail(f"{len(value)} prompts; at most {PROMPTS_MAX} are accepted in one request")
    if isinstance(value[0], str):
        if not all(isinstance(item, str) for item in value):
            raise _fail("a list of prompts must hold strings only, or lists of token ids only")
        return value
    return [_token_ids(item) for item in value]


def _stop_strings(value: object) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise _fail("expected a string or a list of strings")
    if len(strings) > STOP_STRINGS_MAX:
        raise _fail(f"{len(strings)} stop strings; at most {STOP_STRINGS_MAX} are accepted")
    for item in strings:
        if not item:
            raise _fail("a stop string must not be empty")
        if len(item) > STOP_CHARACTERS_MAX:
            raise _fail(
                f"a stop string has at most {STOP_CHARACTERS_MAX} characters; got {len(item)}"
            )
    return strings


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _fail("expected a map from token id to bias")
    if len(value) > BIASES_MAX:
        raise _fail(f"{len(value)} entries; at most {BIASES_MAX} are accepted")
    biases = {}
    for token, bias in value.items():
        if not (
            isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10
        ):
            raise _fail(f"a key must be a token id; got {token!r:.40}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _fail(f"a bias must be a number from -100 to 100; got {bias!r:.40}")
        biases[int(token)] = float(bias)
    return biases


def _text(value: object) -> str:
    """Join a message's text parts, one a line as vLLM does."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _fail("expected a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _fail(
                f"content parts of type {kind!r:.40} are not supported yet; expected 'text'"
            )
        if not isinstance(part.get("text"), str):
            raise _fail("a text part needs a string `text`")
        texts.append(part["text"])
    return "\n".join(texts)


_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = _STRICT

    include_usage: bool = False


class _Sampled(BaseModel):
    """The fields that completions and chat share."""

    model_config = _STRICT

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=TOKEN_ID_MAX)  # -1 and 0: off
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=CHOICES_MAX)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # a logit over it stays a number
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = []
    stop_token_ids: Annotated[
        list[int], BeforeValidator(_token_ids), Field(max_length=STOP_TOKENS_MAX)
    ] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = Field("", max_length=1024)

    @model_validator(mode="after")
    def _check_stream(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise _fail(
                "stream_options is only allowed when stream is true", field="stream_options"
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends in a chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Sampled):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    add_special_tokens: bool = True
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise _fail(
                f"best_of ({self.best_of}) other than n ({self.n}) is not supported yet",
                field="best_of",
            )
        if len(self.prompt) * self.n > PROMPTS_MAX:
            raise _fail(
                f"{len(self.prompt)} prompts with n = {self.n} make "
                f"{len(self.prompt) * self.n} choices; at most {PROMPTS_MAX} are accepted",
                field="n",
            )
        return self

    @property
    def tokens_max(self) -> int | None:
        """The limit that was asked for."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """The name of the field that `tokens_max` comes from."""
        return "max_tokens"


def _no_tools_role(value: object) -> object:
    if value in ("tool", "function"):
        raise _fail(f"a message of role {value!r} is not supported yet")
    return value


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = _STRICT

    role: Annotated[
        Literal["system", "developer", "user", "assistant"], BeforeValidator(_no_tools_role)
    ]
    content: Annotated[str, BeforeValidator(_text)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, value: object) -> object:
        if isinstance(value, dict):
            for name in ("tool_calls", "function_call", "audio", "refusal"):
                if value.get(name):
                    raise _fail(f"a message with {name} is not supported yet")
        return value


class ChatRequest(_Sampled):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_lengths(self) -> ChatRequest:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise _fail(
                "set max_completion_tokens or max_tokens, not both to different values",
                field="max_completion_tokens",
            )
        return self

    @property
    def tokens_max(self) -> int | None:
        """Whichever of the two names was used."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The name of the field that `tokens_max` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


# Fields whose being ignored would change the answer, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_request": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_REFUSED_IN: Mapping[type[BaseModel], Mapping[str, tuple[object, ...]]] = {
    CompletionRequest: {"suffix": ("",), "logprobs": ()},
    ChatRequest: {
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
}

Form = TypeVar("Form", bound=BaseModel)


def parse(body: bytes, form: type[Form]) -> Form:
    """Read a request's body; raises Invalid naming the field that is wrong."""
    try:
        raw: Any = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        half = " (\\u escapes of surrogates come in pairs)" if "hex escape" in str(error) else ""
        raise Invalid(f"the body is not JSON: {error}{half}") from None
    if not isinstance(raw, dict):
        raise Invalid("the body must be a JSON object")
    given = {name: value for name, value in raw.items() if value is not None}  # null: the default
    for name, neutral in (dict(_REFUSED) | dict(_REFUSED_IN[form])).items():
        if name in given and not _one_of(_without_nulls(given[name]), neutral):
            raise Invalid(_refusal(name, given[name]), parameter=name)
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _invalid(error) from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if part is not None}
    return value


def _one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Compare as JSON does: `true` is not 1."""
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refusal(name: str, value: object) -> str:
    """Say that a field is not supported, with its value as JSON has it, or as far as its type."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return f"{name} of type {value['type']!r:.40} is not supported yet"
    if isinstance(value, dict | list):
        return f"{name} is not supported yet"
    text = json.dumps(value, ensure_ascii=False)
    return f"{name} = {text if len(text) <= 80 else text[:77] + '...'} is not supported yet"


def _invalid(error: ValidationError) -> Invalid:
    """Report the first problem only, as OpenAI does."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    name = ".".join(path)
    if first["type"] == "missing":
        return Invalid(f"{name} is required", parameter=name)
    if first["type"] == "kvass":
        message = f"{name}: {first['msg']}" if name else first["msg"]
        return Invalid(message, parameter=name or first["ctx"]["field"] or None)
    return Invalid(f"{name}: {first['msg']}; got {_short(first['input'])}", parameter=name)
