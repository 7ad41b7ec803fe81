"""F066: a process number that exists is not the process that wrote it.

Law: forged and left-over entries are freed in a bounded time, who beats in another namespace stays, and nothing is ever signalled.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from polykv_proxy.gpu_share import layout, schedule
from tests import native
from tests.integration.gpu_share.peers import Company, company, driver, new_key, segment

HEARTBEAT_AT = 64 + 24
NOT_VISIBLE = 2**31 - 1


@pytest.fixture
def peers() -> Iterator[Company]:
    with company(driver()) as made:
        yield made


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        assert made.poll() is None
        made.communicate(b"\n")
        assert made.returncode == 0


def now_us() -> int:
    return time.time_ns() // 1000


def forged(slot: int, pid: int, *, age_us: int = 0, started_us: int | None = None) -> layout.Entry:
    boot = now_us() - 10**8 if started_us is None else started_us
    return layout.Entry(slot, pid, 9, boot, 5.0, True, now_us() - age_us, 0, "forged")


def test_entries_of_nobody_go_and_their_share_goes_back(peers: Company, bystander: subprocess.Popen[bytes]) -> None:
    """Another process' number, an old one from elsewhere, one from an earlier boot; a fresh one from elsewhere stays."""
    with new_key() as key:
        written = [
            forged(0, NOT_VISIBLE),
            forged(1, bystander.pid, started_us=1),
            forged(2, NOT_VISIBLE - 1, age_us=4_000_000),
            forged(3, bystander.pid, age_us=10**12, started_us=5),
        ]
        segment(key).write_bytes(layout.build(written))
        segment(key).chmod(0o600)
        peer = peers.join(key)
        with segment(key).open("r+b") as file, mmap.mmap(file.fileno(), layout.SIZE) as memory:
            while True:
                memory[HEARTBEAT_AT : HEARTBEAT_AT + 8] = struct.pack("<q", now_us())
                peer.ask("work")
                left = layout.parse(memory[:])
                if len(left) == 2:
                    break
        assert {one.pid for one in left} == {NOT_VISIBLE, peer.process.pid}
        assert [float(share) for share in schedule.shares([one.weight for one in left])] == pytest.approx([5 / 6, 1 / 6])


def test_our_own_number_with_another_start_is_somebody_else(peers: Company) -> None:
    """A process that finds its number in the registry does not take that entry for its own."""
    with new_key() as key:
        peer = peers.join(key)
        other = forged(7, peer.process.pid, started_us=12345)
        with segment(key).open("r+b") as file, mmap.mmap(file.fileno(), layout.SIZE) as memory:
            at = 64 + 7 * 128
            memory[at : at + 128] = layout.build([other])[at : at + 128]
            assert peer.ask("await 2") == "peers 2 slot 0"
            assert peer.ask("await 1") == "peers 1 slot 0"
            while len(layout.parse(memory[:])) > 1:
                peer.ask("work")


def test_no_source_of_ours_can_send_a_signal() -> None:
    """Nothing that was read in the registry could be sent one."""
    sources = [file.read_text() for file in native.OURS.glob("gpu-share-*")]
    assert len(sources) > 5
    assert not [found for text in sources for found in re.findall(r"\b(?:kill|tgkill|raise|pidfd_send_signal|killpg)\s*\(", text)]
