"""Mirrors api/document.py: the document names every route of ours, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from polykv_proxy.api import document as made_by
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


def test_each_type_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many operations answer with it: every start makes the document."""
    asked = Counter[str]()

    def adapter(shape: type) -> TypeAdapter[Any]:
        asked[shape.__name__] += 1
        return TypeAdapter(shape)

    monkeypatch.setattr(made_by, "TypeAdapter", adapter)
    assert document.__wrapped__() == document()
    assert set(asked.values()) == {1}
