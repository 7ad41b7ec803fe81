"""docs/http-api.md is held to the code."""

import re
from pathlib import Path

from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext
from polykv_proxy.api.wire import CompactPool, CreatePool, ForkPool, PinPool, SetWeight, UnpinPool, VerifyPool
from polykv_proxy.core.pools import Residency
from polykv_proxy.core.retention import Keep
from polykv_proxy.errors import KINDS
from polykv_proxy.observability.engine_source import EngineSource
from polykv_proxy.observability.page import MetricsPage
from polykv_proxy.runtime.news import Topic
from polykv_proxy.runtime.rows import PeerRow, PoolRow, PoolSession, SessionRow, Whole
from tests.integration.rig import rig

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


async def test_every_route_has_a_heading_and_every_heading_a_route(tmp_path: Path) -> None:
    """The page's route headings are exactly the routes that the application has."""
    async with rig(tmp_path) as proxy:
        page = MetricsPage(EngineSource(proxy.runtime.hub.client.metrics, lambda: None), tuple)
        paths = build_app(ApiContext(proxy.runtime, metrics=page)).openapi()["paths"]
    routes = {(method.upper(), re.sub(r"\{.*?\}", "{}", path)) for path, methods in paths.items() for method in methods}
    found = re.findall(r"^### `([A-Z]+) (\S+.*?)`$", PAGE, re.MULTILINE)
    headings = {(method, re.sub(r"\{.*?\}", "{}", path)) for method, path in found}
    assert routes == headings


def test_every_field_and_word_is_on_the_page() -> None:
    """Body fields of our verbs, residencies, and what keeps a pool stand on the page."""
    for field in {
        name
        for model in (CreatePool, ForkPool, CompactPool, PinPool, UnpinPool, VerifyPool, SetWeight)
        for name in model.model_fields
    }:
        assert f"`{field}`" in PAGE, field
    for word in (*Residency, *(keep for keep in Keep if keep is not Keep.GRACE)):
        assert f"`{word.value}`" in PAGE, word


def test_the_error_table_has_every_code_under_its_status() -> None:
    """Each code that a client can get stands in the row of its status, and no row names another."""
    rows = dict(re.findall(r"^\| (\d{3}) \| (.*) \|$", PAGE, re.MULTILINE))
    named = {(int(status), code) for status, text in rows.items() for code in re.findall(r"`([a-z_]+)`", text) if code in KINDS}
    assert named == {(kind.status, code) for code, kind in KINDS.items()}


def test_every_field_that_is_shown_is_on_the_page() -> None:
    """Rows of pools, of sessions and of the whole, and the topics of events."""
    for row in (PoolRow, PoolSession, SessionRow, Whole, PeerRow):
        for field in row.__slots__:
            assert f'"{field}"' in PAGE, field
    for topic in Topic:
        assert f"| `{topic.value}` |" in PAGE


async def test_a_shown_pool_has_the_fields_of_the_page(tmp_path: Path) -> None:
    """The example of a pool has the keys that a pool really has."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt="one two")
    example = re.search(r'```json\n(\{"pool_id".*?)```', PAGE, re.DOTALL)
    assert example is not None
    assert list(pool) == [key for key in re.findall(r'"(\w+)":', example[1]) if key in pool and key not in {"session_id", "state"}]
