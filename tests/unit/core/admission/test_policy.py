"""Mirrors core/admission/policy.py."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission.policy import (
    BOUNDS,
    DEFAULT_SCOPE,
    Mode,
    OnSaturation,
    Policies,
    Policy,
    Ruling,
    objections,
    policy_of,
)
from polykv_proxy.errors import ApiError

TREE = {2: 1, 3: 2, 5: 4}


def test_what_is_left_out_is_the_documents_default() -> None:
    """1, 48 and 5000, advisory; a line of 64 and half a minute."""
    policy = policy_of({"target_tps_per_session": 5})
    assert (policy.mode, policy.on_saturation) == (Mode.ADVISORY, OnSaturation.REJECT)
    assert (policy.guarantee_min_sessions, policy.settle_tokens, policy.settle_max_ms) == (1, 48, 5000)
    assert (policy.max_queue, policy.queue_timeout_ms, policy.hold_s) == (64, 30_000, 6)


def test_a_policy_is_read_as_it_is_written() -> None:
    """Through JSON and back."""
    policy = Policy(7.5, Mode.ENFORCED, OnSaturation.QUEUE, fail_fast=True)
    assert policy_of(json.loads(json.dumps(policy.as_object()))) == policy


def test_what_is_left_out_stays_as_above() -> None:
    """A pool that sets one field keeps the others of the policy that held before."""
    above = Policy(7.5, Mode.ENFORCED, OnSaturation.QUEUE, settle_tokens=9, protect_floors=True)
    changed = policy_of({"target_tps_per_session": 3}, above)
    assert changed == Policy(3, Mode.ENFORCED, OnSaturation.QUEUE, settle_tokens=9)


def test_objections_name_every_field_at_once() -> None:
    """In the words of the refusal, and none where it would be taken."""
    assert list(objections({"mode": "x", "color": 1, "protect_floors": True})) == [
        "target_tps_per_session",
        "mode",
        "color",
        "protect_floors",
    ]
    assert objections({"target_tps_per_session": 5, "protect_floors": True}, for_pool=False) == {}


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({}, "target_tps_per_session", "a number from 0.001 to 1e+06"),
        ({"target_tps_per_session": 0}, "target_tps_per_session", "a number from"),
        ({"target_tps_per_session": float("nan")}, "target_tps_per_session", "a number from"),
        ({"target_tps_per_session": True}, "target_tps_per_session", "a number from"),
        ({"target_tps_per_session": "5"}, "target_tps_per_session", "a number from"),
        ({"target_tps_per_session": 5, "settle_tokens": 4.5}, "settle_tokens", "a whole number from 1 to 65536"),
        ({"target_tps_per_session": 5, "mode": "strict"}, "mode", "one of advisory, enforced"),
        ({"target_tps_per_session": 5, "on_saturation": None}, "on_saturation", "one of reject, warn, queue"),
        ({"target_tps_per_session": 5, "while_held": 1}, "while_held", "one of silence, comments, chunks"),
        ({"target_tps_per_session": 5, "fail_fast": 1}, "fail_fast", "true or false"),
        ({"target_tps_per_session": 5, "floor": 1}, "floor", "target_tps_per_session, mode"),
        ({"target_tps_per_session": 5, "protect_floors": True}, "protect_floors", "only the default policy"),
    ],
)
def test_a_bad_field_is_named_with_what_may_stand_there(given: dict[str, object], param: str, says: str) -> None:
    """400, the field, its value and the bounds; in the list of objections too."""
    assert param in objections(given)
    with pytest.raises(ApiError, match=param) as caught:
        policy_of(given)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message


@given(st.sampled_from(sorted(BOUNDS)), st.integers() | st.floats() | st.text() | st.none() | st.booleans())
def test_a_policy_is_within_its_bounds_or_is_none(name: str, value: object) -> None:
    """Whatever comes in: a value within, or an error that names the field."""
    with suppress(ApiError):
        policy = policy_of({"target_tps_per_session": 5, name: value})
        assert BOUNDS[name].low <= getattr(policy, name) <= BOUNDS[name].high
        return
    with pytest.raises(ApiError) as caught:
        policy_of({"target_tps_per_session": 5, name: value})
    assert caught.value.param == name


def test_the_nearest_policy_above_holds() -> None:
    """Own before inherited, whole; another tree and requests without a pool have theirs."""
    policies, root, middle, default = Policies(TREE.get), Policy(1), Policy(2), Policy(3, protect_floors=True)
    assert policies.ruling(3) is None
    policies.set(1, root)
    policies.set(DEFAULT_SCOPE, default)
    assert policies.ruling(3) == Ruling(1, root)
    assert policies.ruling(5) is None
    assert policies.ruling(None) == Ruling(DEFAULT_SCOPE, default)
    policies.set(2, middle)
    assert policies.ruling(3) == Ruling(2, middle)
    assert policies.remove(2) == middle
    assert policies.remove(2) is None
    assert policies.ruling(3) == Ruling(1, root)


def test_plain_traffic_respects_the_floors_of_pools_where_asked_to() -> None:
    """The highest floor that is enforced, and no advisory one."""
    policies, default = Policies(TREE.get), Policy(3, protect_floors=True)
    policies.set(DEFAULT_SCOPE, default)
    policies.set(1, Policy(20, Mode.ENFORCED))
    policies.set(4, Policy(30))
    assert policies.floor(Ruling(DEFAULT_SCOPE, default)) == 20
    assert policies.floor(Ruling(DEFAULT_SCOPE, Policy(3))) == 3
