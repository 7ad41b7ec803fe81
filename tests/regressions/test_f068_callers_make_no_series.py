"""F068: whatever paths, methods, models, sessions and pools callers name, the metrics page has the same series."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_FIRST, N_MORE = 2, 60
N_COUNTED = 4
"""Of each round's requests; those of our own routes are not."""
REQUESTS = "polykv_requests_total"


def series(proxy: Product) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of the page, by name and labels, with its value."""
    families = text_string_to_metric_families(proxy.http.get("/metrics").text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def n_requests(proxy: Product) -> float:
    return sum(value for (name, _), value in series(proxy).items() if name == REQUESTS)


def traffic(proxy: Product, first: int, n: int) -> None:
    """So many of each kind, with names that nobody has used before."""
    ask = {"prompt": [1, 2, 3], "n_predict": 1}
    for i in range(first, first + n):
        proxy.http.post("/v1/completions", json={**ask, "model": f"model-{i}@pool-{i}", "session_id": f"session-{i}"})
        proxy.http.post("/completion", json=ask, headers={"x-pool-id": f"pool-{i}"})
        proxy.http.get(f"/unknown/{i}")
        proxy.http.get(f"/polykv/unknown/{i}")
        proxy.http.request(f"ODD{i}", "/v1/models")
        proxy.http.delete(f"/polykv/sessions/session-{i}")


def test_the_page_is_as_long_as_before(engine_path: Path, tmp_path: Path) -> None:
    """After a few of each kind there is every series that many of each make; in the end no session is left."""
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 1024, "-np", 2]) as proxy:
        traffic(proxy, 0, N_FIRST)
        proxy.until(lambda: n_requests(proxy) == N_COUNTED * N_FIRST)
        before = set(series(proxy))
        traffic(proxy, N_FIRST, N_MORE)
        proxy.until(lambda: n_requests(proxy) == N_COUNTED * (N_FIRST + N_MORE))
        assert set(series(proxy)) - before == set()
        text = proxy.http.get("/metrics").text
        assert len(text) < 200_000
        assert not any(name in text for name in ("model-", "session-", "pool-", "unknown/", "ODD"))
        assert proxy.get("/polykv/sessions")["sessions"] == []
