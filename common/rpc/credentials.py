"""What a member proves itself with, and what it takes as proof. One object for all connections."""

from __future__ import annotations

from dataclasses import dataclass

from kvass.common.config import ClusterConfig
from kvass.common.rpc.tls import Tls, tls_of
from kvass.common.secret import Secret, secret_of


@dataclass(frozen=True, slots=True)
class Credentials:
    """The cluster's secret and, where the config names certificates, TLS."""

    secret: Secret
    tls: Tls | None = None


def credentials_of(cluster: ClusterConfig) -> Credentials:
    """Read what the config names; raises Invalid, naming the file that is wrong."""
    return Credentials(secret_of(cluster), tls_of(cluster))
