"""The routing table."""

from __future__ import annotations

import pytest

from polykv_proxy.api.relay.targets import Routes, Where, decoded_path
from polykv_proxy.core.tally import Route

ROUTES = Routes()


@pytest.mark.parametrize(
    ("method", "target", "where"),
    [
        (b"POST", b"/v1/chat/completions", Where.GENERATE),
        (b"POST", b"/v1/chat/completions?x=1", Where.GENERATE),
        (b"POST", b"/v1/chat%2Fcompletions", Where.GENERATE),
        (b"POST", b"/v1/chat/completions#x", Where.GENERATE),
        (b"POST", b"/v1/chat/completions#?x", Where.GENERATE),
        (b"POST", b"/v1/%uD800chat/comple%udfFftions", Where.GENERATE),
        (b"POST", b"/v1/%U0063hat/completions", Where.ENGINE),
        (b"POST", b"/embedding#", Where.POOLLESS),
        (b"POST", b"/infill", Where.GENERATE),
        (b"POST", b"/v1/messages", Where.GENERATE),
        (b"POST", b"/responses", Where.GENERATE),
        (b"GET", b"/v1/chat/completions", Where.ENGINE),
        (b"POST", b"/v1/embeddings", Where.POOLLESS),
        (b"POST", b"/v1/reranking?x", Where.POOLLESS),
        (b"POST", b"/audio%2ftranscriptions", Where.POOLLESS),
        (b"GET", b"/v1/embeddings", Where.ENGINE),
        (b"POST", b"/v1/messages/count_tokens", Where.ENGINE),
        (b"OPTIONS", b"*", Where.ENGINE),
        (b"GET", b"/polykv", Where.OWN),
        (b"GET", b"/polykv/pools?a=/b", Where.OWN),
        (b"GET", b"/%70olykv/health", Where.OWN),
        (b"GET", b"/gpu/peers", Where.OWN),
        (b"GET", b"/polykvx", Where.ENGINE),
        (b"GET", b"/x?next=/_polykv/v1/hello", Where.ENGINE),
        (b"GET", b"/_polykv/v1/hello", Where.PRIVATE),
        (b"GET", b"/_polykv", Where.PRIVATE),
        (b"GET", b"/x%2f_polykv%2fv1", Where.PRIVATE),
        (b"GET", b"/_polykv#/v1", Where.PRIVATE),
        (b"GET", b"/%ud800_polykv/v1/hello", Where.PRIVATE),
        (b"GET", b"/_poly%uDFFFkv/v1/hello", Where.PRIVATE),
        (b"GET", b"/%u005fpolykv/v1/hello", Where.PRIVATE),
        (b"GET", b"/x#/_polykv/v1", Where.ENGINE),
        (b"GET", b"/%u00255fpolykv", Where.ENGINE),
        (b"GET", b"/polykv#x", Where.OWN),
    ],
)
def test_each_target_has_one_owner(method: bytes, target: bytes, where: Where) -> None:
    """Decisions are made on the decoded path, without the query."""
    assert ROUTES.where(method, target) is where


def test_a_prefix_of_the_engine_moves_its_generating_routes() -> None:
    """With --api-prefix only prefixed paths generate."""
    routes = Routes(api_prefix=b"/llm")
    assert routes.where(b"POST", b"/llm/v1/chat/completions") is Where.GENERATE
    assert routes.where(b"POST", b"/llm/rerank") is Where.POOLLESS
    assert routes.where(b"POST", b"/v1/chat/completions") is Where.ENGINE
    assert routes.where(b"GET", b"/llm/_polykv/v1/state") is Where.PRIVATE


def test_extended_paths_are_ours() -> None:
    """Reading a path whose answer we extend goes to the application; everything else there stays the engine's."""
    routes = Routes(own_exact=frozenset({b"/metrics"}))
    assert routes.where(b"GET", b"/metrics?x") is routes.where(b"HEAD", b"/%6detrics") is Where.OWN
    assert routes.where(b"POST", b"/metrics") is routes.where(b"OPTIONS", b"/metrics") is Where.ENGINE
    assert routes.where(b"GET", b"/metrics/x") is Where.ENGINE


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (b"/v1/chat/completions?x", Route.CHAT),
        (b"/llm/v1/messages", Route.MESSAGES),
        (b"/infill", Route.INFILL),
        (b"/v1/rerank", Route.RERANK),
        (b"/audio%2Ftranscriptions", Route.AUDIO),
        (b"/v1/messages/count_tokens", Route.OTHER),
        (b"", Route.OTHER),
        (b"/" + b"x" * 9000, Route.OTHER),
    ],
)
def test_paths_are_of_few_kinds(target: bytes, kind: Route) -> None:
    """Any path is one of the kinds that are counted."""
    assert Routes(api_prefix=b"/llm").kind(target) is kind


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://h:1/a%20b?c", b"/a b"),
        (b"/%zz", b"/%zz"),
        (b"/%u0041", b"/A"),
        (b"/%u20ac%uD800", b"/\xe2\x82\xac"),
        (b"/%U0041%u004", b"/%U0041%u004"),
        (b"/%2541%u002541%%41", b"/%41%41%A"),
        (b"/a#?b", b"/a"),
        (b"/a?b#c", b"/a"),
        (b"/+", b"/+"),
    ],
)
def test_paths_are_decoded_once(target: bytes, path: bytes) -> None:
    """Authority, query and fragment are cut, escapes decoded as the engine does it, nonsense kept."""
    assert decoded_path(target) == path
