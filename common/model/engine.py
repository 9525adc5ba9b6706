"""What a worker computes with: the model, its paged pool and the runner over both, ready to use.

Opening it checks everything a worker can check by itself: the hash functions, that the pool holds
the longest request, and the known answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvass.common import cpus, keys
from kvass.common.block import BlockLayout
from kvass.common.config import Config, WorkerConfig
from kvass.common.errors import Invalid
from kvass.common.kernels.paged import paged_kv
from kvass.common.keys import Namespace
from kvass.common.model import identity, known_answer
from kvass.common.model.checkpoint import executed_as, weights_digest
from kvass.common.model.device_kind import device_kind
from kvass.common.model.fetch import cache_dir
from kvass.common.model.key_terms import key_terms
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import ModelSpec, load_spec
from kvass.common.pages import Pages, private_pages, shared_pages
from kvass.common.pool.memory import SlotMemory
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.size import pool_slots

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker's means. `tokens_per_s` is the prefill rate measured while opening.

    `deterministic`: a row's bits don't depend on its company; `deterministic_reason` says why.
    `took_s`: seconds of opening it, by what they were spent on.
    """

    model_dir: Path
    spec: ModelSpec
    layout: BlockLayout
    namespace: Namespace
    fields: dict[str, str | int]
    max_model_len: int
    memory: SlotMemory
    pool: BlockPool
    runner: Runner
    deterministic: bool
    deterministic_reason: str
    tokens_per_s: float
    took_s: Mapping[str, float]


def open_engine(config: Config, worker: WorkerConfig, role: str) -> Engine:
    """Load the model of `config` (a directory) and prove the pool; blocks for seconds.

    Raises Invalid for what an operator must change, Unavailable when the known answer is wrong.
    """
    started_s = time.perf_counter()
    keys.self_check()
    torch.set_num_threads(worker.threads or cpus.usable())
    model_dir = Path(config.cluster.model)
    spec = load_spec(model_dir)
    layout = identity.layout_of(spec, config.cluster)
    max_model_len = identity.max_model_len(spec, config.cluster)
    slots = pool_slots(layout, worker, role, max_model_len)
    digest = weights_digest(model_dir, spec)
    weights = executed_as(model_dir, config.cluster.weights)
    suffix = "" if weights in ("bf16", "native") else f".{weights}"
    answer_file = cache_dir() / "known-answers" / f"{digest[:32]}{suffix}.safetensors"
    answer = known_answer.known_answer(model_dir, spec, answer_file, weights)
    products = Products(uses(), weights)
    model = load_model(model_dir, spec, projection_of=products.projection)
    loaded_s = time.perf_counter()
    memory = SlotMemory(layout, slots, _pages_for(role))
    terms = None
    if layout.has_scales:
        terms = key_terms(model_dir, spec, cache_dir() / "key-terms" / f"{digest[:32]}.safetensors")
    kv = paged_kv(memory, layout, spec.heads, *(terms or ()))
    fields = identity.worker_fields(
        *(model_dir, spec, config.cluster, device_kind(products, kv.bits)),
        "none" if terms is None else terms.digest(),
    )
    if fields["model_weights"] != digest:
        raise Invalid(f"{model_dir}: the weights were changed while they were loaded: start again")
    namespace = identity.namespace_in(fields)
    assert namespace is not None
    runner = Runner(model, kv, layout.block_tokens)
    known_answer.check(answer, spec, runner, memory, terms and terms.offsets)
    rate = _measure(runner, spec, layout, min(worker.chunk_tokens, max_model_len))
    _log.info(
        "known answer right; pool of %d blocks (%.2f GB), prefill at %.0f tokens/s",
        slots, memory.size / 1e9, rate,
    )  # fmt: skip
    deterministic = kv.deterministic and not products.failures
    reason = f"{products.reason}; {kv.reason}"
    _report(deterministic, reason)
    return Engine(
        model_dir=model_dir,
        spec=spec,
        layout=layout,
        namespace=namespace,
        fields=fields,
        max_model_len=max_model_len,
        memory=memory,
        pool=BlockPool(slots),
        runner=runner,
        deterministic=deterministic,
        deterministic_reason=reason,
        tokens_per_s=rate,
        took_s={"model": loaded_s - started_s, "warm-up": time.perf_counter() - loaded_s},
    )


def _pages_for(role: str) -> Callable[[int], Pages]:
    """What a prefill worker has computed a store node reads: out of shared pages in one pass. A
    decode worker reads its pool again for each token: faster on huge pages, with long contexts."""
    return shared_pages if role == "prefill" else private_pages


def _report(deterministic: bool, reason: str) -> None:
    if deterministic:
        _log.info("deterministic: yes (%s)", reason)
        return
    _log.warning(
        "deterministic: no (%s). This worker serves, but the same prompt may get other tokens in "
        "other company: try another number of threads, or another version of torch",
        reason,
    )


def _measure(runner: Runner, spec: ModelSpec, layout: BlockLayout, chunk_tokens: int) -> float:
    """Prefill a chunk and return tokens a second; it also warms the buffers up."""
    count = min(chunk_tokens, 256)
    tokens = [(31 * index + 7) % spec.vocab_size for index in range(count)]
    slots = list(range(-(-count // layout.block_tokens)))
    started_s = time.perf_counter()
    runner.run([Rows(tokens, 0, slots, logits=True)])
    return count / (time.perf_counter() - started_s)
