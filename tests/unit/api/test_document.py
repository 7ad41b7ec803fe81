"""Mirrors api/document.py: the document names every route of ours, and nothing else."""

from __future__ import annotations

from pathlib import Path

from polykv_proxy.api.document import OPERATIONS, document
from tests.integration.rig import rig


async def test_every_route_is_in_the_document(tmp_path: Path) -> None:
    """Methods and paths, both ways; the engine's own `/metrics` and the page are no verbs."""
    async with rig(tmp_path) as proxy:
        found = {
            (method.upper(), path)
            for path, methods in proxy.app.openapi()["paths"].items()
            for method in methods
            if "/ui" not in path
        }
        assert found - {("GET", "/metrics")} == set(OPERATIONS)
        served = (await proxy.api.get("/polykv/openapi.json")).json()
        assert served == document()


def test_references_lead_somewhere() -> None:
    """Each schema that is named is there."""
    text = repr(document())
    named = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert named == set(document()["components"]["schemas"])
