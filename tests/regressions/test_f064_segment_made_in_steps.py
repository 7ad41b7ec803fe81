"""F064: creating a segment and giving it a size are two steps; who opens it between them does not stumble.

Law: no exception, one entry for each process, and what a dead creator left at size 0 is made whole by the next who comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polykv_proxy.gpu_share import layout
from tests.integration.gpu_share.peers import Company, company, driver, new_key, segment

ROUNDS = 50


@pytest.fixture
def peers() -> Iterator[Company]:
    with company(driver()) as made:
        yield made


def all_have_places(peers: list[str], key: str) -> None:
    assert sorted(peers) == sorted(f"joined {slot}" for slot in range(16))
    assert [one.slot for one in layout.parse(segment(key).read_bytes())] == list(range(16))


def test_sixteen_that_start_at_once_find_a_place_each_in_every_round() -> None:
    for _ in range(ROUNDS):
        with new_key() as key, company(driver()) as peers:
            started = [peers.start("join", key) for _ in range(16)]
            all_have_places([peer.heard() for peer in started], key)


def test_who_comes_between_the_two_steps_goes_on_from_there(peers: Company) -> None:
    with new_key() as key:
        creator = peers.start("create", key)
        assert creator.heard() == "created"
        assert segment(key).stat().st_size == 0
        started = [peers.start("join", key) for _ in range(16)]
        all_have_places([peer.heard() for peer in started], key)
        assert creator.ask("go on") == "sized"
        assert [peer.ask("await 16").partition(" slot")[0] for peer in started] == ["peers 16"] * 16


def test_what_a_killed_creator_left_is_made_whole(peers: Company) -> None:
    with new_key() as key:
        creator = peers.start("create", key)
        assert creator.heard() == "created"
        creator.process.kill()
        creator.process.wait()
        assert segment(key).stat().st_size == 0
        started = [peers.start("join", key) for _ in range(16)]
        all_have_places([peer.heard() for peer in started], key)
