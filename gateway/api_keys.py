"""Whose request it is: API keys, and the tenants that they stand for.

    # gateway.api_keys_file, TOML, readable by its user only
    alice = ["sk-0123456789abcdef0123456789abcdef"]
    bob = ["sha256:…64 hex digits…", "sk-…"]        # several keys, or what `sha256sum` says of one

    [operators]                                     # whose keys open /v1/cluster, and nothing else
    on_call = ["sk-…"]

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
OPERATORS = "operators"  # the table of those who look after the cluster
TENANT_MAX = 256  # of a name on the wire
_NAME = re.compile(r"""\s*([A-Za-z0-9_-]+|"[^"]+"|'[^']+')\s*=""")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")


class ApiKeys:
    """Tenants and operators by the digests of their keys. Immutable; none: everybody is the empty
    tenant, and an operator."""

    __slots__ = ("_operators", "_tenants")

    def __init__(
        self, tenants: Mapping[bytes, str], operators: Mapping[bytes, str] | None = None
    ) -> None:
        self._tenants = dict(tenants)
        self._operators = dict(operators or {})

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._tenants)}, {len(self._operators)})"

    @property
    def operators(self) -> int:
        """How many keys of operators there are."""
        return len(self._operators)

    def tenant(self, authorization: str) -> str:
        """Return whose request it is by its Authorization header; raises Invalid: 401, or 403 for
        an operator's key."""
        if not self._tenants:
            return ""
        digest = _digest_in(authorization)
        found = _find(digest, self._tenants)
        if found is None and _find(digest, self._operators) is not None:
            raise Invalid(
                "This is an operator's key: it opens /v1/cluster, and asks for no completions",
                http_status=403,
            )
        if found is None:
            raise Invalid("Incorrect API key provided", http_status=401)
        return found

    def require_operator(self, authorization: str) -> None:
        """Let an operator in by his Authorization header; raises Invalid: 401, or 403 for a
        tenant's key."""
        if not self._tenants or _find(_digest_in(authorization), self._operators) is not None:
            return
        if not self._operators:
            raise Invalid(
                "This needs an operator's key, and gateway.api_keys_file names none: add "
                '`[operators]` and a line like on_call = ["key"] at its end, and restart the '
                "gateway",
                http_status=403,
            )
        if _find(_digest_in(authorization), self._tenants) is not None:
            raise Invalid(
                "This needs an operator's key, one of [operators] in gateway.api_keys_file; the "
                "key is a tenant's",
                http_status=403,
            )
        raise Invalid("Incorrect API key provided", http_status=401)


def _digest_in(authorization: str) -> bytes:
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Invalid(
            "You didn't provide an API key: send it in the header `Authorization: Bearer KEY`",
            http_status=401,
        )
    return sha256(key.strip().encode()).digest()


def _find(digest: bytes, names: Mapping[bytes, str]) -> str | None:
    found = None
    for known, name in names.items():
        if hmac.compare_digest(known, digest):
            found = name
    return found


def load_keys(file: str) -> ApiKeys:
    """Read `gateway.api_keys_file`; raises Invalid, which never shows a key."""
    if not file:
        return ApiKeys({})
    path = Path(file)
    try:
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("%s can be read by other users of this machine: chmod 600 it", path)
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise Invalid(f"gateway.api_keys_file {path} cannot be read: {error}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"gateway.api_keys_file {path} {_why_no_toml(str(error), text)}") from None
    operators = tree.pop(OPERATORS, {})
    if not isinstance(operators, dict):
        raise Invalid(
            f"{path}: {OPERATORS} is no tenant's name: expected a table, the line [{OPERATORS}] "
            'and under it lines like on_call = ["key"]'
        )
    tenants = _digests(tree, path)
    if not 0 < len(tenants) <= KEYS_MAX:
        raise Invalid(f"{path}: {len(tenants)} keys; expected 1 to {KEYS_MAX}")
    names = _digests(operators, path)
    if both := tenants.keys() & names.keys():
        pair = [(tenants[digest], names[digest]) for digest in both]
        raise Invalid(f"{path}: {pair[0][0]!r} and the operator {pair[0][1]!r} have the same key")
    return ApiKeys(tenants, names)


def _why_no_toml(error: str, text: str) -> str:
    """Say what is wrong and where; never what stands behind a `=`."""
    if error.startswith("Cannot overwrite a value"):
        seen: dict[tuple[str, str], int] = {}
        section = ""
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("[") and "=" not in line:
                section = line.strip()
            elif name := _NAME.match(line):
                first = seen.setdefault((section, name[1].strip("\"'")), number)
                if first != number:
                    return (
                        f"names {name[1]} twice, in lines {first} and {number}: put all of its "
                        "keys in one list"
                    )
    at = re.search(r"at line (\d+)", error)
    where = f" in line {at[1]}" if at else ""
    return f'is no TOML{where}; expected lines like tenant = ["key"]'


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
    return tenants


def _digest(key: object) -> bytes | None:
    if not isinstance(key, str):
        return None
    if known := _DIGEST.match(key):
        return bytes.fromhex(known[1])
    if len(key) < CHARACTERS_MIN or key != "".join(key.split()) or key.startswith("sha256:"):
        return None
    return sha256(key.encode()).digest()
