"""A broker in a process of its own: `python broker_process.py HOST:PORT`. Says `ready`; ends with
its standard input."""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from kvass.launch.broker import run_broker


async def run(address: str) -> None:
    async with run_broker(address):
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(run, sys.argv[1])
