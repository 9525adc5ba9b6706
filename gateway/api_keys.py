"""Whose request it is: API keys, and the tenants that they stand for.

    # gateway.api_keys_file, TOML, readable by its user only
    alice = ["sk-0123456789abcdef0123456789abcdef"]
    bob = ["sha256:…64 hex digits…", "sk-…"]        # several keys, or what `sha256sum` says of one

The tenant comes from the key alone, never from what a client says of itself; it enters the salt of
the request's blocks and goes with them to the store. Keys are kept as digests and compared in a
time that does not depend on where they differ. Without a file no key is asked for, and the tenant
is the empty one.
"""

from __future__ import annotations

import hmac
import logging
import re
import stat
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from kvass.common.errors import Invalid

_log = logging.getLogger(__name__)

KEYS_MAX = 4096  # each request is compared with all: 2 ms
CHARACTERS_MIN = 16  # as of the cluster's secret: fewer can be guessed
TENANT_MAX = 256  # of a name on the wire
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")


class ApiKeys:
    """Tenants by the digests of their keys. Immutable; none: everybody is the empty tenant."""

    __slots__ = ("_tenants",)

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = dict(tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._tenants)})"

    def tenant(self, authorization: str) -> str:
        """Return whose request it is by its Authorization header; raises Invalid (401)."""
        if not self._tenants:
            return ""
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Invalid(
                "You didn't provide an API key: send it in the header `Authorization: Bearer KEY`",
                http_status=401,
            )
        digest = sha256(key.strip().encode()).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Invalid("Incorrect API key provided", http_status=401)
        return found


def load_keys(file: str) -> ApiKeys:
    """Read `gateway.api_keys_file`; raises Invalid, which never shows a key."""
    if not file:
        return ApiKeys({})
    path = Path(file)
    try:
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("%s can be read by other users of this machine: chmod 600 it", path)
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeError) as error:
        raise Invalid(f"gateway.api_keys_file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError:
        raise Invalid(
            f'gateway.api_keys_file {path} is no TOML; expected lines like tenant = ["key"]'
        ) from None
    return ApiKeys(_digests(tree, path))


def _digests(tree: Mapping[str, object], path: Path) -> dict[bytes, str]:
    tenants: dict[bytes, str] = {}
    for tenant, keys in tree.items():
        if not 0 < len(tenant) <= TENANT_MAX or not isinstance(keys, list) or not keys:
            raise Invalid(f"{path}: {tenant!r}: expected a name and a list of its keys")
        for number, key in enumerate(keys):
            digest = _digest(key)
            if digest is None:
                raise Invalid(
                    f"{path}: key {number} of {tenant!r}: expected {CHARACTERS_MIN} characters or "
                    "more without spaces, or sha256: and 64 hex digits"
                )
            if digest in tenants:
                raise Invalid(f"{path}: {tenants[digest]!r} and {tenant!r} have the same key")
            tenants[digest] = tenant
    if not 0 < len(tenants) <= KEYS_MAX:
        raise Invalid(f"{path}: {len(tenants)} keys; expected 1 to {KEYS_MAX}")
    return tenants


def _digest(key: object) -> bytes | None:
    if not isinstance(key, str):
        return None
    if known := _DIGEST.match(key):
        return bytes.fromhex(known[1])
    if len(key) < CHARACTERS_MIN or key != "".join(key.split()) or key.startswith("sha256:"):
        return None
    return sha256(key.encode()).digest()
