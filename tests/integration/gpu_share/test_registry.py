"""The registry in shared memory, between processes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Iterator

import pytest

from polykv_proxy.gpu_share import layout
from tests.integration.gpu_share.peers import Company, company, driver, new_key, segment
from tests.unit.gpu_share.test_layout import GOLDEN


@pytest.fixture
def peers() -> Iterator[Company]:
    with company(driver()) as made:
        yield made


@pytest.fixture
def key() -> Iterator[str]:
    with new_key() as made:
        yield made


@pytest.mark.parametrize("sanitizer", ["none", "thread", "address"])
def test_the_laws_of_a_member_hold_and_no_sanitizer_has_anything_to_say(sanitizer: str) -> None:
    """Every law of `tests/cpp/gpu_share_driver.cpp`, with a world made by hand."""
    done = subprocess.run([driver(sanitizer), "laws"], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == ["holds"] * 9


def test_cpp_writes_the_bytes_of_the_golden_file() -> None:
    assert subprocess.run([driver(), "golden"], capture_output=True, check=True).stdout == GOLDEN.read_bytes()


def test_peers_see_each_other_and_take_turns_only_while_both_work(peers: Company, key: str) -> None:
    first, second = peers.join(key), peers.join(key, "2")
    assert first.ask("await 2") == "peers 2 slot 0"
    assert second.ask("await 2") == "peers 2 slot 1"
    assert first.ask("work") == "free"
    first.say("await-turns")
    second.say("await-turns")
    assert (first.heard(), second.heard()) == ("turns", "turns")
    assert first.ask("await-alone") == "alone"
    assert first.ask("await 2") == "peers 2 slot 0"


def test_the_python_reader_reads_what_peers_write(peers: Company, key: str) -> None:
    first, second = peers.join(key, "1.5"), peers.join(key)
    first.ask("work")
    second.ask("weight 3")
    found = layout.parse(segment(key).read_bytes())
    assert [(one.slot, one.pid, one.weight, one.active, one.name) for one in found] == [
        (0, first.process.pid, 1.5, True, "driver"),
        (1, second.process.pid, 3.0, False, "driver"),
    ]
    assert segment(key).stat().st_mode & 0o777 == 0o600


def test_a_killed_peer_is_gone_and_its_slot_is_used_again(peers: Company, key: str) -> None:
    first, second = peers.join(key), peers.join(key)
    second.process.kill()
    second.process.wait()
    assert first.ask("await 1") == "peers 1 slot 0"
    assert first.ask("await-alone") == "alone"
    while len(layout.parse(segment(key).read_bytes())) > 1:
        first.ask("await 1")
    third = peers.join(key)
    assert third.ask("await 2") == "peers 2 slot 1"


def test_a_stopped_peer_has_no_window_and_comes_back_to_its_slot(peers: Company, key: str) -> None:
    first, second = peers.join(key), peers.join(key)
    second.ask("work")
    second.process.send_signal(signal.SIGSTOP)
    assert first.ask("await 1") == "peers 1 slot 0"
    assert first.ask("await-alone") == "alone"
    second.process.send_signal(signal.SIGCONT)
    assert first.ask("await 2") == "peers 2 slot 0"
    assert second.ask("await 2") == "peers 2 slot 1"


def test_who_leaves_frees_the_slot_at_once(peers: Company, key: str) -> None:
    first, second = peers.join(key), peers.join(key)
    assert first.ask("leave") == "left"
    assert second.ask("await 1") == "peers 1 slot 1"
    assert [one.slot for one in layout.parse(segment(key).read_bytes())] == [1]


def test_the_seventeenth_is_told_that_there_is_no_slot(peers: Company, key: str) -> None:
    for _ in range(16):
        peers.join(key)
    late = peers.start("join", key)
    assert late.heard() == "refused: all 16 slots are taken by living engines"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"OCGPX\0\0\0".ljust(4096, b"\0"), "does not begin with OCGPU"),
        (b"OCGPU\0\0\0" + struct.pack("<II", 2, 16) + bytes(4080), "version 2, this program knows version 1"),
        (b"OCGPU\0\0\0" + struct.pack("<II", 1, 8) + bytes(4080), "8 slots instead of 16"),
        (b"x" * 100, "100 bytes instead of 4096"),
        (b"x" * 8192, "8192 bytes instead of 4096"),
    ],
)
def test_a_segment_of_another_kind_is_refused_and_left_as_it_is(peers: Company, key: str, content: bytes, said: str) -> None:
    segment(key).write_bytes(content)
    segment(key).chmod(0o600)
    heard = peers.start("join", key).heard()
    assert heard.startswith("refused: ")
    assert said in heard
    assert "choose another --gpu-share-key" in heard
    assert segment(key).read_bytes() == content


def test_a_segment_that_others_may_write_to_is_refused(peers: Company, key: str) -> None:
    segment(key).write_bytes(layout.build(()))
    segment(key).chmod(0o666)
    assert "other users may write to it" in peers.start("join", key).heard()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_segment_of_another_user_is_refused(peers: Company, key: str) -> None:
    segment(key).write_bytes(layout.build(()))
    segment(key).chmod(0o600)
    os.chown(segment(key), 65534, 65534)
    heard = peers.start("join", key).heard()
    assert "belongs to user 65534 and this process runs as user 0" in heard
