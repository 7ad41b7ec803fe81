"""The relay: a byte pump between clients and the engine, below ASGI.

Law: it knows HTTP and nothing of pools; what it must ask, it asks a `ports.RequestGate`. It never rewrites a body; pages to
which something is added are kept back whole, and are not its business either (`Relay.additions`). Everything
runs on the event loop's thread, in protocol callbacks; a task exists only while a connection is made or a gate decides.
"""

from polykv_proxy.api.relay.protocol import RelayProtocol
from polykv_proxy.api.relay.relay import Relay, RelayLimits
from polykv_proxy.api.relay.targets import Routes
from polykv_proxy.api.relay.upstream_pool import UpstreamPool

__all__ = ["Relay", "RelayLimits", "RelayProtocol", "Routes", "UpstreamPool"]
