"""A client connection that ends by a reset leaves nothing behind: its timer held it, and all it had read, for 75 seconds."""

from __future__ import annotations

import gc
import time

from polykv_proxy.api.relay import Relay, RelayProtocol
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import Client, RelayRig, request
from tests.fakes.stub_engine import Stub, reply

N_CLIENTS = 30
HANG_GUARD_S = 20


def n_kept(relay: Relay) -> int:
    """Connections of this relay: others of this process are not asked about."""
    gc.collect()
    return sum(isinstance(one, RelayProtocol) and one.relay is relay for one in gc.get_objects())


def test_they_are_forgotten_at_once() -> None:
    """Before a request, in its head, in its body, and after its answer."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as relay:
        for n in range(N_CLIENTS):
            client = Client(relay.port)
            client.send([b"", b"GET /slots HTTP", request(b"POST", b"/tokenize", b"x" * 99)[:-50], request()][n % 4])
            if n % 4 == 3:
                client.reply()
            client.reset()
        end = time.monotonic() + HANG_GUARD_S
        while relay.on_loop(lambda: n_kept(relay.relay)):
            assert time.monotonic() < end, "connections that are gone are still kept"
