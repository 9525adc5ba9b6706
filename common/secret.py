"""The secret that all members of a cluster share: where it comes from, and what is signed with it.

    KVASS_CLUSTER_SECRET  ──or──>  cluster.secret, cluster.secret_file  ──or──>  the user's own file

The last one is made by the first member that needs it, readable by its user only, so members that
one user starts on one host find each other and nobody else finds them. There is no cluster without
a secret. It signs what is said; it hides nothing. It never leaves this module: not into a log, a
repr, an argument or a message.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
from pathlib import Path

from kvass.common.config import ClusterConfig
from kvass.common.errors import Invalid

_log = logging.getLogger(__name__)

VARIABLE = "KVASS_CLUSTER_SECRET"
# An active peer may try guesses on what it recorded; what `openssl rand -hex 32` prints is 64 long.
CHARACTERS_MIN = 16
CHARACTERS_MAX = 1024
MAC_BYTES = 32
REMEDY = f"give every member the same by {VARIABLE} or cluster.secret_file"


class Secret:
    """Signs. Immutable; `source` says in words where it came from."""

    __slots__ = ("_key", "source")

    def __init__(self, text: str, source: str) -> None:
        if not CHARACTERS_MIN <= len(text) <= CHARACTERS_MAX:
            raise Invalid(
                f"the cluster secret from {source} has {len(text)} characters; expected "
                f"{CHARACTERS_MIN} to {CHARACTERS_MAX}, such as what `openssl rand -hex 32` prints"
            )
        self._key = text.encode()
        self.source = source

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"

    def mac(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of parts; what is signed for one purpose proves no other."""
        said = b"".join(len(part).to_bytes(8, "little") + part for part in (purpose, *parts))
        return hmac.digest(self._key, said, "sha256")

    def signed(self, mac: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether a MAC is right, in a time that does not depend on where it is wrong."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))


def secret_of(cluster: ClusterConfig) -> Secret:
    """Return the cluster's secret; raises Invalid, naming what to do, when there can be none."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return Secret(named, VARIABLE)
    configured = cluster.secret.get_secret_value()
    if configured:
        return Secret(configured, "cluster.secret")
    if cluster.secret_file:
        return _read(Path(cluster.secret_file), f"cluster.secret_file {cluster.secret_file}")
    return _own(own_file())


def own_file() -> Path:
    """Return where a user's own secret is kept: kvass in the user's configuration folder (XDG)."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if folder else Path.home() / ".config") / "kvass" / "cluster-secret"


def _own(path: Path) -> Secret:
    try:
        if not path.exists():
            _make(path)
    except OSError as error:
        raise Invalid(
            f"there is no cluster secret: {VARIABLE} and cluster.secret_file are not set, and "
            f"{path} cannot be written ({error.strerror or error})"
        ) from None
    return _read(path, str(path))


def _make(path: Path) -> None:
    """Write a new secret, whole or not at all: of members that start together one makes it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # another member was faster
    finally:
        draft.unlink(missing_ok=True)
    _log.info("made a cluster secret: %s", path)


def _read(path: Path, source: str) -> Secret:
    try:
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning("%s can be read by every user of this machine: chmod 600 it", path)
        with path.open("rb") as file:
            text = file.read(4 * CHARACTERS_MAX + 1).decode().strip()
    except (OSError, UnicodeError) as error:
        raise Invalid(f"{source} cannot be read: {error}") from None
    return Secret(text, source)
