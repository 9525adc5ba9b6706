"""What members would refuse when they start, found before any of them does. Torch-free.

Each member checks by itself, and has to: it may be started by hand, on another host. `kvass up`
starts many that have the same settings, on this machine: here what is wrong is said once, in one
line, and nothing has run. It refuses to know what only a running member finds out: whether the
weights are what they were, the known answer, a disk, a bucket.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kvass.common import cpus, descriptors
from kvass.common.addresses import require_interface, require_own
from kvass.common.config import Config
from kvass.common.errors import Invalid
from kvass.common.membership import Role
from kvass.common.model.checkpoint import open_checkpoint
from kvass.common.model.identity import layout_of, max_model_len
from kvass.common.model.spec import load_spec
from kvass.common.pool.size import pool_slots
from kvass.common.rpc.credentials import credentials_of
from kvass.gateway.api_keys import load_keys
from kvass.kvstore.objects.extra import require_client


def require_places(config: Config) -> None:
    """Refuse, with Invalid, what is wrong with addresses, ports and secrets, and a limit of open
    files that is too low."""
    if config.store.standalone:
        raise Invalid(
            "store.standalone is set: the nodes of `kvass up` belong to its cluster; "
            "`kvass store --standalone` runs one by itself"
        )
    descriptors.require_enough()
    require_own(config.gateway.host, config.gateway.port, section="gateway.")
    require_own(config.host)
    require_interface(config.transport.interface)
    credentials_of(config.cluster)
    load_keys(config.gateway.api_keys_file)


def require_roles(config: Config, roles: Collection[Role]) -> None:
    """Refuse, with Invalid, what these roles cannot do here; the model is a directory by now."""
    cluster, model_dir = config.cluster, Path(config.cluster.model)
    spec = load_spec(model_dir)
    open_checkpoint(model_dir, spec)
    layout, longest = layout_of(spec, cluster), max_model_len(spec, cluster)
    if "prefill" in roles:
        pool_slots(layout, config.prefill, "prefill", longest)
    if "decode" in roles:
        pool_slots(layout, config.decode, "decode", longest)
    if "store" in roles:
        require_client(config.store.bucket)
    listed: dict[Role, str] = {
        "prefill": config.prefill.cpus,
        "decode": config.decode.cpus,
        "store": config.store.cpus,
    }
    for role, text in listed.items():
        if role in roles and text:
            cpus.require(text, f"{role}.cpus")
