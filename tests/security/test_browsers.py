"""A page of somebody else, in a browser on this machine, changes nothing here and reads nothing of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.api.local_names import LocalNames
from polykv_proxy.ports import EngineAddress
from polykv_proxy.prepared import prepare
from polykv_proxy.settings import load_settings
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Stub, reply
from tests.integration.rig import rig

HOST = "127.0.0.1:8080"
STRANGE = {"origin": "http://evil.example", "content-type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin", "origin": f"http://{HOST}"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", **STRANGE}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": f"http://{HOST}"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"origin": f"https://{HOST}"}, 200),  # TLS ends in front of us
        (STRANGE, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
    ],
)
async def test_a_change_comes_from_our_own_page_or_from_no_page(headers: dict[str, str], status: int, tmp_path: Path) -> None:
    """A form or a fetch of another origin needs no leave to be sent: it is refused by what the browser says of it."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="a b", name="p")
        got = await proxy.api.post("/polykv/pools/p/evict", headers={"host": HOST, **headers})
        assert got.status_code == status, got.text
        assert (await proxy.api.get("/polykv/pools/p")).json()["residency"] == ("evicted" if status == 200 else "resident")


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH"])
async def test_every_change_is_looked_at(method: str, tmp_path: Path) -> None:
    """On all our routes, before the key and the route are; reads of other origins are kept from them by the browser."""
    async with rig(tmp_path, keys=Keys(frozenset({"k"}))) as proxy:
        for path in ("/polykv/pools", "/polykv/sessions", "/gpu/weight", "/polykv/nothing"):
            assert (await proxy.api.request(method, path, headers=STRANGE)).status_code == 403
        read = await proxy.api.get("/polykv/pools", headers={**STRANGE, "x-api-key": "k"})
        assert read.status_code == 200
        assert not [name for name in read.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8080", True),
        ("LOCALHOST", True),
        ("app.localhost:8080", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("192.168.1.5", True),
        ("gpubox:8080", True),
        ("gpubox.local", True),
        ("host.docker.internal:8080", True),
        ("proxy.example.org", True),
        ("evil.example:8080", False),
        ("evil.example.", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8080", False),
        ("xn--local.example", False),
    ],
)
async def test_a_name_that_a_stranger_may_have_pointed_here_opens_nothing(host: str, known: bool, tmp_path: Path) -> None:
    """DNS rebinding: a page of such a name is of our own origin to the browser, and would read and change everything."""
    names = LocalNames(frozenset({"proxy.example.org"}))
    async with rig(tmp_path, hosts=names) as proxy:
        for method, path in (("GET", "/polykv/pools"), ("POST", "/polykv/pools"), ("GET", "/polykv/ui")):
            got = await proxy.api.request(method, path, json={"prompt": "a b"}, headers={"host": host})
            assert (got.status_code == 403) is not known, got.text
            assert known or "--allowed-hosts" in got.text


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, LocalNames()),
        ({"host": "::1"}, LocalNames()),
        ({"allowed_hosts": "a.example, B.example"}, LocalNames(frozenset({"a.example", "b.example"}))),
        ({"admin_key": "k"}, LocalNames()),
        ({"api_key": "k"}, None),
        ({"api_key": "k", "allowed_hosts": "a.example"}, None),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, LocalNames(frozenset({"a.example"}))),
        ({"host": "0.0.0.0", "allowed_hosts": "a.example", "api_key": "k"}, None),
    ],
)
def test_names_count_on_loopback_and_where_they_are_given(given: dict[str, str], names: LocalNames | None) -> None:
    """Where everybody may call anyway, or a key is wanted that a strange page does not have, any name will do; who names some for
    nothing is told."""
    ready = prepare(load_settings({"engine_url": "http://127.0.0.1:1", "port": 0, **given}, env={}), {})
    found, notes = ready.names, ready.notes
    ready.close()
    assert found == names
    assert any("--allowed-hosts says nothing" in note for note in notes) is ("allowed_hosts" in given and names is None)


def test_relayed_routes_keep_the_engine_s_own_rules() -> None:
    """Its CORS fields cross as they are, for a preflight too; nothing is added, and no origin is refused by us."""
    cors = b"Access-Control-Allow-Origin: http://evil.example\r\nAccess-Control-Allow-Headers: *\r\n"
    origin = b"Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\n"
    with Stub(lambda _: reply(extra=cors)) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        for method in (b"OPTIONS", b"POST"):
            got = proxy.send(request(method, b"/v1/chat/completions", b"{}", origin))
            assert (got.status, got.header(b"access-control-allow-origin")) == (200, [b"http://evil.example"])
            assert got.header(b"access-control-allow-headers") == [b"*"]
        assert stub.requests[0].header(b"origin") == [b"http://evil.example"]
