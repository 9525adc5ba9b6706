"""Who is in the cluster of `kvass up` without having been started by it.

It looks at what the cluster's broker has retained, so it needs no gateway, and nobody's answer.
Whoever did not sign with the cluster's secret is none of its members, as for every member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvass.common.bus import Topics
from kvass.common.config import ClusterConfig
from kvass.common.errors import Invalid, Unauthorized
from kvass.common.membership import Peer
from kvass.common.rpc.credentials import credentials_of
from kvass.common.seal import Seal
from kvass.common.transport.identity import own_identity


def started_by_hand(
    retained: Mapping[str, bytes], cluster: ClusterConfig, own_pids: Collection[int]
) -> list[str]:
    """Return the members that are none of these processes, each with where it runs.

    `retained` is what the broker keeps, by topic. Raises KvassError when there is no secret.
    """
    topics, seal = Topics(cluster.name), Seal(credentials_of(cluster).secret)
    host_id = own_identity().host_id
    found = []
    for topic, payload in sorted(retained.items()):
        about = topics.parse(topic)
        if about is None or about.kind != "member":
            continue
        try:
            peer = seal.open(topic, payload, Peer).body
        except (Invalid, Unauthorized):
            continue
        is_here = peer.host_id == host_id
        if not (is_here and peer.pid in own_pids):
            host = "this host" if is_here else "another host"
            found.append(f"{peer.member_id} (pid {peer.pid} on {host})")
    return found
