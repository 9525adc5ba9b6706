"""From a valid request to asks: token ids, limits, sampling and salt of every prompt in it.

It knows the one model that is served, by its facts alone (window, vocabulary, tokenizer); it
refuses to know weights and workers. After this nothing about a request can be wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import anyio.to_thread

from kvass.common import wire
from kvass.common.errors import Invalid
from kvass.common.keys import PUBLIC, Chain, Namespace, Salt, salt_of
from kvass.gateway.openai import ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
THREAD_CHARACTERS = 2048  # about 1 ms of tokenising: longer texts must not hold the event loop
TOP_P_MIN = 1e-6  # OpenAI accepts 0, meaning the most likely token alone

T = TypeVar("T")


class ContextTooLong(Invalid):
    """Prompt and answer do not fit the model's window together."""


class Text(Protocol):
    """What the gateway needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """The one model that this gateway serves."""

    name: str
    created_s: int  # Unix time
    window: int  # tokens, of prompt and answer together
    vocabulary: int
    namespace: Namespace  # while no worker has said its own
    block_tokens: int
    block_bytes: int
    text: Text
    salt_secret: bytes = b""
    prefix_reuse: bool = True

    def chain(self, tokens: Sequence[int], salt: Salt, namespace: Namespace | None = None) -> Chain:
        """Name the blocks of a private token sequence, under the workers' namespace."""
        chain = Chain(namespace or self.namespace, self.block_tokens, salt=salt)
        chain.extend(tokens)
        return chain

    def salt(self, cache_salt: str, tenant: str = "") -> Salt:
        """Return the salt of a request's blocks; a fresh one where reuse is off."""
        if not self.prefix_reuse:
            return Salt(secrets.token_bytes(32))
        return salt_of(self.salt_secret, tenant, cache_salt)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with everything that its `choices` answers depend on."""

    request_id: str
    tokens: tuple[int, ...]
    choices: int
    sampling: wire.Sampling
    stop: wire.Stop
    salt: Salt = PUBLIC
    tenant: str = ""
    echo: str = ""  # text that goes before each answer


async def of_completion(
    form: CompletionRequest, served: Served, request_id: str, tenant: str = ""
) -> list[Ask]:
    """Turn /v1/completions into one ask a prompt; raises Invalid."""
    _check_model(form.model, served)
    sampling, salt = _sampling(form, served), served.salt(form.cache_salt, tenant)
    asks = []
    for index, prompt in enumerate(form.prompt):
        if isinstance(prompt, str):
            encode = partial(served.text.encode, prompt, add_special_tokens=form.add_special_tokens)
            tokens = await _off_loop(len(prompt), encode)
        else:
            tokens = prompt
            _check_vocabulary(tokens, served, "prompt")
        echo = ""
        if form.echo:
            echo = prompt if isinstance(prompt, str) else served.text.decode(tokens)
        most = _tokens_max(len(tokens), form, COMPLETION_TOKENS, served, "prompt")
        asks.append(
            Ask(
                request_id=f"{request_id}-{index}",
                tokens=tuple(tokens),
                choices=form.n,
                sampling=sampling,
                stop=_stop(form, most, served),
                salt=salt,
                tenant=tenant,
                echo=echo,
            )
        )
    return asks


async def of_chat(
    form: ChatRequest, served: Served, request_id: str, tenant: str = ""
) -> list[Ask]:
    """Turn /v1/chat/completions into its one ask; raises Invalid."""
    _check_model(form.model, served)
    messages = [
        {
            # OpenAI's name for what templates call the system's turn
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content,
        }
        for message in form.messages
    ]
    size = sum(len(message["content"]) for message in messages)
    prompt = form.add_generation_prompt
    tokens = await _off_loop(
        size, lambda: served.text.render_chat(messages, add_generation_prompt=prompt)
    )
    most = _tokens_max(len(tokens), form, served.window, served, "messages")
    ask = Ask(
        request_id=f"{request_id}-0",
        tokens=tuple(tokens),
        choices=form.n,
        sampling=_sampling(form, served),
        stop=_stop(form, most, served),
        salt=served.salt(form.cache_salt, tenant),
        tenant=tenant,
    )
    return [ask]


async def _off_loop(characters: int, work: Callable[[], T]) -> T:
    if characters <= THREAD_CHARACTERS:
        return work()
    return await anyio.to_thread.run_sync(work)


def _check_model(name: str, served: Served) -> None:
    if name != served.name:
        raise Invalid(
            f"The model {name!r} does not exist; this server has {served.name!r}",
            parameter="model",
            http_status=404,
        )


def _check_vocabulary(tokens: Sequence[int], served: Served, parameter: str) -> None:
    if tokens and max(tokens) >= served.vocabulary:
        raise Invalid(
            f"{parameter}: token id {max(tokens)} is not in the vocabulary of "
            f"{served.vocabulary} tokens",
            parameter=parameter,
        )


def _tokens_max(
    prompt: int,
    form: CompletionRequest | ChatRequest,
    default: int,
    served: Served,
    parameter: str,
) -> int:
    """Return how many tokens may be generated; raises Invalid if the window cannot hold them.

    To blame is the limit where the prompt alone would fit, else the prompt, which is `parameter`.
    """
    if prompt == 0:
        raise Invalid(f"{parameter} is empty: expected at least one token", parameter=parameter)
    asked, left = form.tokens_max, served.window - prompt
    wanted = asked if asked is not None else max(1, min(default, left))
    if wanted > left:
        raise ContextTooLong(
            f"This model's maximum context length is {served.window} tokens. However, you "
            f"requested {prompt + wanted} tokens ({prompt} in the {parameter}, {wanted} for the "
            f"completion). Please shorten one of them.",
            parameter=form.limit_name if left > 0 else parameter,
        )
    return wanted


def _sampling(form: CompletionRequest | ChatRequest, served: Served) -> wire.Sampling:
    _check_vocabulary(list(form.logit_bias), served, "logit_bias")
    return wire.Sampling(
        temperature=form.temperature,
        top_p=max(form.top_p, TOP_P_MIN),
        top_k=max(form.top_k, 0),
        min_p=form.min_p,
        seed=secrets.randbits(63) if form.seed is None else form.seed,
        presence_penalty=form.presence_penalty,
        frequency_penalty=form.frequency_penalty,
        repetition_penalty=form.repetition_penalty,
        logit_bias=form.logit_bias,
    )


def _stop(form: CompletionRequest | ChatRequest, most: int, served: Served) -> wire.Stop:
    _check_vocabulary(form.stop_token_ids, served, "stop_token_ids")
    if form.min_tokens > most:
        raise Invalid(
            f"min_tokens ({form.min_tokens}) is more than max_tokens ({most})",
            parameter="min_tokens",
        )
    return wire.Stop(
        max_tokens=most,
        strings=tuple(form.stop),
        token_ids=tuple(form.stop_token_ids),
        min_tokens=form.min_tokens,
        ignore_eos=form.ignore_eos,
        include_stop_string=form.include_stop_str_in_output,
    )
