"""A page of another origin, in a real browser beside the proxy: it changes nothing, reads nothing and frames nothing."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, Route

from polykv_proxy.api.local_names import LocalNames
from tests.browser.visit import live
from tests.integration.rig import Rig, relayed

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEND = """async ([url, method, kind]) => {
    const sent = {method, mode: "no-cors", body: "{}", headers: {"content-type": kind}};
    return (await fetch(url, sent).then(reply => reply.type, error => "failed"));
}"""
READ = "async url => fetch(url).then(reply => reply.text(), error => 'failed')"
FORM = """async url => {
    const form = document.createElement("form");
    form.action = url; form.method = "POST"; form.target = "_blank"; form.enctype = "text/plain";
    document.body.append(form); form.submit();
}"""
FRAME = """async url => {
    const frame = document.createElement("iframe");
    const loaded = new Promise(done => { frame.onload = done; });
    frame.src = url; document.body.append(frame); await loaded;
}"""


class _Files(http.server.BaseHTTPRequestHandler):
    """One page, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>strange</title><body>")

    def log_message(self, *_args: object) -> None: ...


@asynccontextmanager
async def strange_page(browser: Browser) -> AsyncIterator[Page]:
    """A page of another server on this machine: from further away Chromium itself lets nothing through to a private address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"http://localhost:{server.server_port}/")
        try:
            yield page
        finally:
            await context.close()
            server.shutdown()


async def _residency(proxy: Rig) -> str:
    return str((await proxy.api.get("/polykv/pools/p")).json()["residency"])


async def test_it_changes_nothing(browser: Browser, tmp_path: Path) -> None:
    """Neither by a fetch that needs no leave, nor by a form; what wants leave does not even get it."""
    async with live(tmp_path) as proxy:
        await proxy.pool(prompt="a b", name="p")
        async with relayed(proxy) as (_, client), strange_page(browser) as page:
            url = f"{client.base_url}/polykv/pools/p/evict"
            assert await page.evaluate(SEND, [url, "POST", "text/plain"]) == "opaque"
            assert await page.evaluate(SEND, [f"{client.base_url}/polykv/pools/p", "DELETE", "text/plain"]) == "failed"
            async with page.context.expect_page() as opened:
                await page.evaluate(FORM, url)
            answer = await opened.value
            await answer.wait_for_load_state()
            assert "another origin" in await answer.content()
            assert await _residency(proxy) == "resident"


async def test_it_reads_nothing(browser: Browser, tmp_path: Path) -> None:
    """The browser keeps what our routes answer from it."""
    async with live(tmp_path) as proxy:
        await proxy.pool(prompt="a b", name="p")
        async with relayed(proxy) as (_, client), strange_page(browser) as page:
            for path in ("/polykv/pools", "/polykv/pools/p/text", "/polykv/health", "/polykv/ui", "/gpu/peers"):
                assert await page.evaluate(READ, f"{client.base_url}{path}") == "failed"


async def test_it_frames_nothing(browser: Browser, tmp_path: Path) -> None:
    """The page is not shown within another, where a click could be stolen."""
    async with live(tmp_path) as proxy, relayed(proxy) as (_, client), strange_page(browser) as page:
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        page.on(
            "console", lambda said: refused.set_result(said.text) if "frame-ancestors" in said.text and not refused.done() else None
        )
        await page.evaluate(FRAME, f"{client.base_url}/polykv/ui")
        assert "frame-ancestors" in await asyncio.wait_for(refused, 60)


async def test_a_name_that_was_pointed_here_is_no_way_in(browser: Browser, tmp_path: Path) -> None:
    """DNS rebinding: to the browser the page and the proxy are one origin; the proxy hears by which name it is called."""
    async with live(tmp_path, hosts=LocalNames()) as proxy:
        await proxy.pool(prompt="a b", name="p")
        async with relayed(proxy) as (_, client):
            context = await browser.new_context()
            page = await context.new_page()
            port = client.base_url.port

            async def rebind(route: Route) -> None:
                """As the stranger's name server would: the same name is now the proxy's address."""
                headers = {**route.request.headers, "host": f"strange.example:{port}"}
                own = route.request.url.replace("strange.example", "127.0.0.1")
                reply = await client.request(route.request.method, own, headers=headers, content=route.request.post_data_buffer)
                await route.fulfill(status=reply.status_code, content_type="text/html", body=reply.text)

            await context.route(f"http://strange.example:{port}/**", rebind)
            await page.goto(f"http://strange.example:{port}/polykv/ui")
            assert "--allowed-hosts" in await page.content()
            assert "--allowed-hosts" in await page.evaluate(READ, f"http://strange.example:{port}/polykv/pools")
            await page.evaluate(SEND, [f"http://strange.example:{port}/polykv/pools/p/evict", "POST", "text/plain"])
            assert await _residency(proxy) == "resident"
            await context.close()
