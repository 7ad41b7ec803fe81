"""The real proxy and engine for the LangGraph package: a tiny model under a chat template that knows tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import models
from tests.fakes.proxy_process import Served

TEMPLATE = Path(models.__file__).with_name("chatml_tools.jinja")
"""SmolLM2's own template knows no tools, and the engine then ignores them."""
N_CTX = 4096


@contextmanager
def served_tiny(engine: Path, folder: Path, *, n_slots: int = 4, n_ctx: int = N_CTX) -> Iterator[Served]:
    """Started, and stopped with 0."""
    args = ["-c", n_ctx, "-np", n_slots, "-t", 1, "--seed", 1, "--temp", 0, "--jinja", "--chat-template-file", TEMPLATE]
    with Served(engine, models.tiny_model("full"), folder, args=[str(arg) for arg in args]) as served:
        yield served
        assert served.stop() == 0
