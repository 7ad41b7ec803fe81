"""Mirrors ui/page.py: what is served, to whom, and under which policy."""

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from polykv_proxy.api.context import Keys
from polykv_proxy.ui.page import STATIC, add_page
from tests.integration.rig import rig

FILES = sorted(path.name for path in STATIC.iterdir() if path.is_file())


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = FastAPI(openapi_url=None)
    add_page(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


async def test_the_page_forbids_what_is_not_a_file_of_ours(client: httpx.AsyncClient) -> None:
    """The policy names no inline source, no eval, no other host, and no markup from strings."""
    policy = (await client.get("/polykv/ui")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert not re.search(r"unsafe|https?:|\*|data:", policy)


async def test_every_file_is_served_with_the_policy_and_a_type(client: httpx.AsyncClient) -> None:
    """Scripts, styles and pictures have their types, so that nosniff lets them in; a second look costs no body."""
    types = {".html": "text/html", ".css": "text/css", ".js": "javascript", ".svg": "image/svg+xml"}
    for name in FILES:
        reply = await client.get(f"/polykv/ui/{name}")
        assert types[Path(name).suffix] in reply.headers["content-type"], name
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "content-security-policy" in reply.headers
        again = await client.get(f"/polykv/ui/{name}", headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_what_is_outside_the_folder_is_not_served(client: httpx.AsyncClient) -> None:
    """Neither by dots nor by their escapes."""
    for path in ("../page.py", "%2e%2e/page.py", "..%2fpage.py", "vendor/%2e%2e/%2e%2e/page.py", "nothing.js"):
        assert (await client.get(f"/polykv/ui/{path}")).status_code == 404, path


async def test_a_slash_at_the_end_leads_to_the_page(client: httpx.AsyncClient) -> None:
    """The page's links are relative, so there is one place for it."""
    reply = await client.get("/polykv/ui/")
    assert reply.is_redirect
    assert str(reply.next_request.url) == "http://proxy/polykv/ui"


async def test_the_files_want_no_key(tmp_path: Path) -> None:
    """They carry no data; what the page then asks for wants the key."""
    async with rig(tmp_path, keys=Keys(frozenset({"secret"}))) as proxy:
        assert (await proxy.api.get("/polykv/ui")).status_code == 200
        assert (await proxy.api.get("/polykv/pools")).status_code == 401
        assert (await proxy.api.options("/polykv/ui")).headers["allow"] == "GET, HEAD, OPTIONS"
        assert (await proxy.api.post("/polykv/ui")).status_code == 405


def test_nothing_is_inline_and_nothing_is_named_that_is_elsewhere() -> None:
    """Neither the page nor its styles and scripts hold inline code or another host's address."""
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)", html)
    for name in FILES:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
