"""The real proxy and engine for the LangGraph package: a tiny model under a template that knows tools, or one that calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import models
from tests.fakes.proxy_process import Served
from tests.models import puppet

TEMPLATE = puppet.TEMPLATE
"""SmolLM2's own template knows no tools, and the engine then ignores them."""
N_CTX = 4096


@contextmanager
def served_tiny(engine: Path, folder: Path, *options: str, n_slots: int = 4, n_ctx: int = N_CTX) -> Iterator[Served]:
    """Random weights: what they say depends on the whole prompt."""
    with _served(engine, models.tiny_model("full"), folder, options, n_slots, n_ctx, "--chat-template-file", TEMPLATE) as served:
        yield served


@contextmanager
def served_puppet(engine: Path, folder: Path, *options: str) -> Iterator[Served]:
    """Weights and template that call the tools which tests offer."""
    with _served(engine, models.puppet_model(), folder, options, 4, 4 * N_CTX) as served:
        yield served


@contextmanager
def _served(
    engine: Path, model: Path, folder: Path, options: tuple[str, ...], n_slots: int, n_ctx: int, *more: object
) -> Iterator[Served]:
    """Started, and stopped with 0."""
    args = ["-c", n_ctx, "-np", n_slots, "-t", 1, "--seed", 1, "--temp", 0, "--jinja", *more]
    with Served(engine, model, folder, *options, args=[str(arg) for arg in args]) as served:
        yield served
        assert served.stop() == 0
