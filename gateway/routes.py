"""The gateway's routes: completions, models, health, the cluster's state, metrics.

It refuses to know how a completion comes about (exchange, session) and how this process came up
(`app`). Every error leaves in OpenAI's shape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import anyio
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvass.common import errors
from kvass.common.config import DEFAULT_BROKER, ClusterConfig
from kvass.gateway import overview, replies
from kvass.gateway.api_keys import ApiKeys
from kvass.gateway.exchange import Exchange
from kvass.gateway.fleet import Fleet
from kvass.gateway.observe import HitRate, outcome_of
from kvass.gateway.openai import ChatRequest, CompletionRequest, parse

BODY_S = 60.0  # a body that takes longer is a client that hangs
# Of a body over the limit this much more is read and dropped: a client that is still writing would
# see a reset connection instead of the answer.
DRAIN_FACTOR = 4
STATS_S = 1.0


def create_app(
    fleet: Fleet,
    registry: CollectorRegistry,
    *,
    cluster: ClusterConfig,
    keys: ApiKeys | None = None,
) -> FastAPI:
    """Build the application over one fleet. Where there are `keys`, tenants' are asked for by what
    tenants use, and operators' by `/v1/cluster`; `/health` and `/metrics` are for probes, and open.
    """
    keys = keys or ApiKeys({})
    app = FastAPI(title="Kvass", docs_url=None, redoc_url=None, openapi_url=None)

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.KvassError)
        if request.method == "POST":
            fleet.metrics.requests.labels(outcome_of(error)).inc()
        status, body, headers = replies.of_error(error)
        return _json(status, body, headers)

    app.add_exception_handler(errors.KvassError, answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_bug)
    _add_completions(app, fleet, keys)
    _add_models(app, fleet, keys)
    _add_probes(app, fleet, registry)
    _add_cluster(app, fleet, cluster, keys)
    return app


def _add_completions(app: FastAPI, fleet: Fleet, keys: ApiKeys) -> None:
    hit_rate = HitRate()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        tenant = _tenant(request, keys)
        body = await _read_body(request, fleet.config.body_bytes_max)
        return Exchange(fleet, hit_rate, parse(body, CompletionRequest), tenant)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        tenant = _tenant(request, keys)
        body = await _read_body(request, fleet.config.body_bytes_max)
        return Exchange(fleet, hit_rate, parse(body, ChatRequest), tenant)


def _add_models(app: FastAPI, fleet: Fleet, keys: ApiKeys) -> None:
    served = fleet.served

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _tenant(request, keys)
        return _json(200, replies.models(served.name, served.created_s, served.window))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _tenant(request, keys)
        if name != served.name:
            raise errors.Invalid(
                f"The model {name!r} does not exist; this server has {served.name!r}",
                parameter="model",
                http_status=404,
            )
        return _json(200, replies.model(served.name, served.created_s, served.window))


def _add_probes(app: FastAPI, fleet: Fleet, registry: CollectorRegistry) -> None:
    @app.get("/health")
    async def health() -> Response:
        why_not = fleet.why_not_ready()
        if why_not is not None:
            return _json(503, {"status": "unavailable", "reason": why_not._asdict()})
        return _json(200, {"status": "ok", "degraded": _told(_degraded(fleet))})

    # A function: the member serves the same registry on a port of its own.
    fleet.metrics.running.set_function(lambda: fleet.admission.choices)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_cluster(app: FastAPI, fleet: Fleet, ours: ClusterConfig, keys: ApiKeys) -> None:
    table = fleet.members.table

    @app.get("/v1/cluster")
    async def cluster(request: Request) -> Response:
        _require_operator(request, keys)
        namespace = fleet.namespace()
        why_not = fleet.why_not_ready()
        return _json(
            200,
            {
                "cluster": ours.name,
                "broker": ours.broker or DEFAULT_BROKER,
                "kv_dtype": ours.kv_dtype,
                "weights": ours.weights,
                "model": fleet.served.name,
                "max_model_len": fleet.served.window,
                # What all keys begin with; empty while no worker is ready.
                "namespace": namespace.hex() if namespace else "",
                # As at /health: why nothing can be asked now, and what is done without.
                "degraded": _told(([why_not] if why_not else []) + _degraded(fleet)),
                "members": overview.members(table, fleet.clock.now_s(), time.time()),
                # One entry a node that answers, with its id.
                "store": [dict(counts) for counts in await fleet.store.stats(deadline_s=STATS_S)],
            },
        )

    @app.delete("/v1/cluster/lost/{member_id}")
    async def forget(request: Request, member_id: str) -> Response:
        _require_operator(request, keys)
        if not table.forget_lost(member_id):
            lost = ", ".join(each.peer.member_id for each in table.lost(fleet.clock.now_s()))
            known = [each for each in table.entries() if each.peer.member_id == member_id]
            now_s = fleet.clock.now_s()
            is_here = any(table.is_live(each, now_s) for each in known)
            how = "is here" if is_here else "is silent, and goes when the broker says so"
            raise errors.Invalid(
                f"no member {member_id!r} is remembered as lost; there are: {lost or 'none'}"
                + (f" ({member_id} {how}: kvass status)" if known else ""),
                http_status=404,
            )
        return _json(200, {"forgotten": member_id})


def _degraded(fleet: Fleet) -> list[overview.Reason]:
    return overview.degraded(fleet.members.table, fleet.clock.now_s(), time.time())


def _told(reasons: Sequence[overview.Reason]) -> list[dict[str, str]]:
    return [reason._asdict() for reason in reasons]


def _require_operator(request: Request, keys: ApiKeys) -> None:
    keys.require_operator(request.headers.get("authorization", ""))


def _tenant(request: Request, keys: ApiKeys) -> str:
    return keys.tenant(request.headers.get("authorization", ""))


async def _read_body(request: Request, size_max: int) -> bytes:
    """Read a request's body; raises Invalid (413) over the limit, before it is all in memory."""
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= size_max:
                    body += chunk
                elif size > DRAIN_FACTOR * size_max:
                    break
    except TimeoutError:
        raise errors.Invalid(f"the body did not arrive in {BODY_S:g} s", http_status=408) from None
    except ClientDisconnect:
        raise errors.Invalid("the client left in mid-body") from None
    if size > size_max:
        raise errors.Invalid(f"the body is over the limit of {size_max} bytes", http_status=413)
    return bytes(body)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return _json(
        error.status_code, replies.error_body(error.status_code, message, code=code), error.headers
    )


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _json(500, replies.error_body(500, "the gateway failed; its log says how"))


def _json(status: int, body: replies.JSON, headers: Mapping[str, str] | None = None) -> Response:
    return Response(replies.encode(body), status, headers=headers, media_type="application/json")
