"""The laws of GPU share in docs/engine-protocol.md, on the fake engine and on the real one. Neither has a device here."""

from __future__ import annotations

import pytest

from polykv_proxy.errors import EngineRefusedError
from tests.contract.conftest import Peer


async def test_an_engine_without_a_device_says_why_it_shares_none(peer: Peer) -> None:
    share = (await peer.client.state()).gpu_share
    assert (share.enabled, share.gpu_key, share.slot) == (False, None, -1)
    assert share.why


async def test_a_weight_without_a_device_is_refused_with_the_reason(peer: Peer) -> None:
    with pytest.raises(EngineRefusedError) as refused:
        await peer.client.set_gpu_weight(2.0)
    assert (refused.value.status, refused.value.kind) == (501, "gpu_share_off")
    why = (await peer.client.state()).gpu_share.why
    assert why is not None
    assert why in str(refused.value)


async def test_what_is_no_weight_is_refused(peer: Peer) -> None:
    for weight in (0.0, -1.0, 1001.0):
        with pytest.raises(EngineRefusedError) as refused:
            await peer.client.set_gpu_weight(weight)
        assert (refused.value.status, refused.value.kind) == (400, "invalid_request_error")
