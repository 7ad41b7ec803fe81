"""Whether the clock of the host was set."""

from __future__ import annotations

from polykv_proxy.gpu_share.clock_watch import GRACE_US, ClockWatch

WALL, MONO = 1_800_000_000_000_000, 77_000_000


def test_a_clock_that_runs_or_is_slewed_was_not_set() -> None:
    watch = ClockWatch()
    assert [watch.look(WALL + n * 1_050_000, MONO + n * 1_000_000) for n in range(20)] == [0] * 20


def test_a_step_is_told_for_a_while_and_steps_add_up() -> None:
    watch = ClockWatch()
    watch.look(WALL, MONO)
    assert watch.look(WALL + 3_600_000_000, MONO) == 3_600_000_000
    assert watch.look(WALL + 3_600_000_000 - 200_000 + 1000, MONO + 1000) == 3_600_000_000 - 200_000
    assert watch.look(WALL + 3_599_800_000 + GRACE_US, MONO + GRACE_US) == 3_599_800_000
    assert watch.look(WALL + 3_599_800_000 + GRACE_US + 1000, MONO + GRACE_US + 1000) == 0


def test_a_host_that_slept_was_set() -> None:
    """The monotonic clock stands still in sleep."""
    watch = ClockWatch()
    watch.look(WALL, MONO)
    assert watch.look(WALL + 8 * 3_600_000_000, MONO + 5) == 8 * 3_600_000_000 - 5
