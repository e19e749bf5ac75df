"""A relay for TCP and UDP that holds everything back for some seconds: `slow_relay.py HOST SERVER TCP UDP SECONDS`.

It listens at HOST on the same ports and passes on to SERVER. A TCP connection is accepted at once; its bytes, and
its end, arrive late.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from safari.net.path import Conditions
from safari.net.udp import Relay


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Bytes from one side to the other, each `seconds` after it came."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def take() -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(65536)
            except OSError:
                data = b""
            waiting.put_nowait((loop.time() + seconds, data))

    taking = loop.create_task(take())
    try:
        while True:
            at, data = await waiting.get()
            await asyncio.sleep(max(at - loop.time(), 0))
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        taking.cancel()
        writer.close()


async def serve(host: str, server: str, tcp: int, udp: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(server, tcp)
        await asyncio.gather(pass_on(reader, far_writer, seconds), pass_on(far_reader, writer, seconds))

    slow = Conditions(delay=seconds)
    async with (
        Relay(host, (server, udp), slow, slow, port=udp),
        await asyncio.start_server(connected, host, tcp) as listener,
    ):
        print("ready", flush=True)
        await listener.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5])))
