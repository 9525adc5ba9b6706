"""Open the real transports of a process. The only module of this folder that its users import for
production, and they do it late: NIXL takes 0.2 s to load, and the gateway never needs it."""

from __future__ import annotations

from collections.abc import Sequence

from kvass.common.config import TransportConfig
from kvass.common.transport.cma import CmaTransport
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.identity import Identity
from kvass.common.transport.landing import TcpLanding
from kvass.common.transport.mover import Mover
from kvass.common.transport.seam import Region
from kvass.common.transport.tcp import TcpTransport


async def open_endpoints(
    config: TransportConfig, identity: Identity, regions: Sequence[Region]
) -> Endpoints:
    """Start the mover thread and this process's transports over `regions` (pool or slab).

    No socket is opened before the first TCP transfer. `close` the result before the memory goes.
    """
    mover = Mover()
    try:
        reader: CmaTransport | None = None
        if config.kind != "tcp":
            reader = await mover.call(lambda: CmaTransport(mover, identity, regions))
        writer = TcpTransport(mover, identity, regions, interface=config.interface)
        landing = TcpLanding(mover, identity, config.landing_bytes, interface=config.interface)
    except BaseException:
        mover.close()
        raise
    return Endpoints(identity, config.kind, reader, writer, landing, mover.close)
