"""Registries in shared memory, read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polykv_proxy.gpu_share import layout
from polykv_proxy.gpu_share.reader import SegmentError, read_registry
from tests.integration.gpu_share.peers import new_key, segment
from tests.unit.gpu_share.registries import entry


@pytest.fixture
def key() -> Iterator[str]:
    with new_key() as made:
        yield made


def test_what_engines_wrote_is_read(key: str) -> None:
    written = (entry(0, 2.0), entry(5, 0.5, active=False))
    segment(key).write_bytes(layout.build(written))
    assert read_registry(key) == written


def test_what_is_no_registry_is_an_error_that_says_why(key: str) -> None:
    with pytest.raises(SegmentError, match=f"/opencoti-gpu-{key}: there is none"):
        read_registry(key)
    segment(key).write_bytes(b"")
    with pytest.raises(SegmentError, match="0 bytes instead of 4096"):
        read_registry(key)
    segment(key).write_bytes(bytes(4096))
    with pytest.raises(SegmentError, match="begins with"):
        read_registry(key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_registry_of_another_user_is_not_read(key: str) -> None:
    segment(key).write_bytes(layout.build(()))
    os.chown(segment(key), 65534, 65534)
    with pytest.raises(SegmentError, match="belongs to user 65534"):
        read_registry(key)


def test_nothing_stays_open(key: str) -> None:
    segment(key).write_bytes(layout.build(()))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_registry(key)
    assert len(os.listdir("/proc/self/fd")) == before
