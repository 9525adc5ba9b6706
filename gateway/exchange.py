"""One completion over HTTP: runs the prompts, writes the answer, notices that the client left.

Nothing is written before the first token is there, so whatever goes wrong until then has its own
status code; later it is an error event, after which the stream ends. It refuses to know routing and
retries: sessions do that.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import AbstractAsyncContextManager

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvass.common import errors
from kvass.common.wire import Delta
from kvass.gateway import ask, replies
from kvass.gateway.ask import Ask
from kvass.gateway.fleet import Fleet
from kvass.gateway.observe import HitRate, Watch, outcome_of
from kvass.gateway.openai import ChatRequest, CompletionRequest
from kvass.gateway.outbox import Outbox, Shifted
from kvass.gateway.replies import Envelope, Piece, Usage
from kvass.gateway.session import Session

_log = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 16  # of one request: a list of prompts must not push everybody else aside


class Exchange(Response):
    """The answer to one request, as an ASGI response.

    Mutable fields: `_started` (the status line is out), `_failure` (what ended it early), `_usage`.
    """

    def __init__(
        self,
        fleet: Fleet,
        hit_rate: HitRate,
        form: CompletionRequest | ChatRequest,
        tenant: str = "",
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._hit_rate = hit_rate
        self._form = form
        self._tenant = tenant
        chat = isinstance(form, ChatRequest)
        self._envelope = Envelope(
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}",
            created_s=int(time.time()),
            model=fleet.served.name,
            chat=chat,
            include_usage=form.include_usage,
        )
        self._watch = Watch(fleet.metrics, fleet.clock)
        self._end_s = fleet.clock.now_s() + fleet.config.request_timeout_s
        self._started = False
        self._failure: errors.KvassError | None = None
        self._usage = Usage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; returns early, with everything cancelled, when the client leaves."""
        whole = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
            await self._serve(send)
            whole = True
            tasks.cancel_scope.cancel()
        if not whole:
            self._watch.ended("disconnected")

    async def _serve(self, send: Send) -> None:
        try:
            async with self._admitted():
                await self._answer(await self._asks(), send)
            self._watch.served(self._usage, self._hit_rate)
        except errors.KvassError as error:
            await self._fail(error, send)
            self._watch.ended(outcome_of(error))

    def _admitted(self) -> AbstractAsyncContextManager[None]:
        fleet = self._fleet
        wait_s = max(self._end_s - fleet.clock.now_s(), 0.0)
        return fleet.admission.admit(self._tenant, self._choices(), fleet.room, wait_s=wait_s)

    def _choices(self) -> int:
        prompts = len(self._form.prompt) if isinstance(self._form, CompletionRequest) else 1
        return prompts * self._form.n

    async def _asks(self) -> list[Ask]:
        answer_id = self._envelope.answer_id
        if isinstance(self._form, ChatRequest):
            return await ask.of_chat(self._form, self._fleet.served, answer_id, self._tenant)
        return await ask.of_completion(self._form, self._fleet.served, answer_id, self._tenant)

    async def _answer(self, asks: list[Ask], send: Send) -> None:
        outbox = Outbox(self._watch.saw)
        echoes = [each.echo for each in asks for _ in range(each.choices)]
        whole = [Piece(index, text=echo) for index, echo in enumerate(echoes)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_all, asks, outbox)
            if self._form.stream:
                await self._pass_on(echoes, outbox, send)
            else:
                await _gather(whole, outbox)
        if self._failure is not None:
            raise self._failure
        if self._form.stream:
            await self._end_stream(send)
        else:
            await self._send_json(200, self._envelope.whole(whole, self._usage), {}, send)

    # --- running ----------------------------------------------------------------------------------

    async def _run_all(self, asks: list[Ask], outbox: Outbox) -> None:
        limiter = anyio.CapacityLimiter(PROMPTS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for index, each in enumerate(asks):
                sink = Shifted(outbox, index * each.choices)
                tasks.start_soon(self._run_one, each, sink, limiter, tasks.cancel_scope)
        outbox.close()

    async def _run_one(
        self, one: Ask, sink: Shifted, limiter: anyio.CapacityLimiter, others: anyio.CancelScope
    ) -> None:
        try:
            async with limiter:
                if one.stop.max_tokens == 0:  # nothing to generate, so nothing to compute
                    for choice in range(one.choices):
                        sink.put(choice, Delta(finish_reason="length"))
                    usage = Usage(prompt_tokens=len(one.tokens))
                else:
                    usage = await Session(self._fleet, one, sink, end_s=self._end_s).run()
                self._usage += usage
        except errors.KvassError as error:
            self._failure = self._failure or error
            others.cancel()

    # --- writing ----------------------------------------------------------------------------------

    async def _pass_on(self, echoes: list[str], outbox: Outbox, send: Send) -> None:
        envelope = self._envelope
        while pieces := await outbox.take():
            chunks = [chunk for piece in pieces for chunk in envelope.chunks(piece)]
            if not self._started:
                await self._start_stream(send)
                chunks = envelope.opening(len(echoes), echoes) + chunks
            await _send_body(b"".join(map(replies.event, chunks)), send)

    async def _end_stream(self, send: Send) -> None:
        if self._envelope.include_usage:
            await _send_body(replies.event(self._envelope.usage_chunk(self._usage)), send)
        await _send_body(replies.DONE, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start_stream(self, send: Send) -> None:
        self._started = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy must pass each event on at once
        }
        await send(_start(200, headers | {"x-request-id": self._envelope.answer_id}))

    async def _fail(self, error: errors.KvassError, send: Send) -> None:
        status, body, headers = replies.of_error(error)
        if status >= 500:
            _log.warning("%s: %s", self._envelope.answer_id, error)
        if self._started:
            await send({"type": "http.response.body", "body": replies.event(body)})
        else:
            await self._send_json(status, body, headers, send)

    async def _send_json(
        self, status: int, body: replies.JSON, headers: dict[str, str], send: Send
    ) -> None:
        encoded = replies.encode(body)
        fixed = {
            "content-type": "application/json",
            "content-length": str(len(encoded)),
            "x-request-id": self._envelope.answer_id,
        }
        self._started = True
        await send(_start(status, fixed | headers))
        await send({"type": "http.response.body", "body": encoded})


async def _gather(whole: list[Piece], outbox: Outbox) -> None:
    while pieces := await outbox.take():
        for piece in pieces:
            choice = whole[piece.index]
            choice.text += piece.text
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _start(status: int, headers: dict[str, str]) -> dict[str, object]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def _send_body(body: bytes, send: Send) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
