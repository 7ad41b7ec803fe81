"""The socket that clients reach."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from polykv_proxy.errors import SettingsError
from polykv_proxy.prepared import prepare
from polykv_proxy.settings import load_settings

N = 40


def test_a_crowd_is_taken_in_rows() -> None:
    """Connections that wait are taken several in each turn of the loop; of a crowd the last would else wait for as many turns."""
    ready = prepare(load_settings({"engine_url": "http://127.0.0.1:1", "port": 0}, env={}), {})
    taken: list[asyncio.BaseTransport] = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.append(transport)

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Taken, sock=one) for one in ready.listeners()]
        with ExitStack() as crowd:
            for _ in range(N):
                crowd.enter_context(socket.create_connection(ready.listener.getsockname()))
            for _ in range(N // 2):
                await asyncio.sleep(0)
        n_taken = len(taken)
        for one in (*servers, *taken):
            one.close()
        return n_taken

    assert uvloop.run(serve()) == N
    ready.close()


@pytest.mark.parametrize(
    ("host", "port", "advice"),
    [("127.0.0.1", None, "choose another --port"), ("192.0.2.1", 0, "as --host"), ("no host", 0, "as --host")],
)
def test_where_it_cannot_listen_it_says_which_option_to_change(host: str, port: int | None, advice: str) -> None:
    """A port that is taken is no fault of the address, and an address that is not of this machine none of the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"engine_url": "http://127.0.0.1:1", "host": host, "port": taken.getsockname()[1] if port is None else port}
        with pytest.raises(SettingsError, match=advice):
            prepare(load_settings(given, env={}), {})
