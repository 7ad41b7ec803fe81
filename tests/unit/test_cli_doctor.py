"""Mirrors cli_doctor.py, and the commands that talk to a proxy."""

import copy
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polykv_proxy import cli_http
from polykv_proxy.cli import app
from polykv_proxy.cli_doctor import BUILD, Level, diagnose, option_findings

CLIENT = httpx.Client
ENGINE: dict[str, Any] = {
    "model": {"name": "toy", "arch": "llama", "fingerprint": "ab"},
    "n_slots": 4,
    "n_ctx_slot": 4096,
    "max_pools": 16,
    "pools_price_bytes": 0,
    "kv": {"unified": True, "cells": 4096, "bytes_per_token": 2048},
    "prefix_sharing": "any",
    "prefix_sharing_why": "plain attention",
    "context_shift": False,
    "cache_reuse": 0,
}
HEALTH: dict[str, Any] = {"state": "ready", "restarts": 0, "command": ["./llamafile"], "pools": {"state": "on", "engine": ENGINE}}

SHARE: dict[str, Any] = {"enabled": True, "why": None, "gpu_key": "k", "n_peers": 0, "weight": 2.0, "share_pct": 66.667}


def changed(**engine: object) -> dict[str, Any]:
    health = copy.deepcopy(HEALTH)
    health["pools"]["engine"].update(engine)
    return health


def test_a_healthy_engine_has_only_good_findings() -> None:
    """Nothing to change: no warning, and the price per token is said."""
    findings = diagnose(HEALTH)
    assert {finding.level for finding in findings} == {Level.GOOD}
    assert any("2.0 KiB per token" in finding.text for finding in findings)


def test_the_share_of_the_device_is_said() -> None:
    """Who else is there, and what the weight is worth now."""
    said = [finding.text for finding in diagnose({**HEALTH, "gpu_share": {**SHARE, "n_peers": 1}}) if "GPU" in finding.text]
    assert said == ["GPU share: 1 other engine on the device, weight 2 is 66.667 % of it now"]


@pytest.mark.parametrize(
    ("health", "level", "text"),
    [
        ({"state": "failed", "reason": "no model", "pools": HEALTH["pools"]}, Level.BAD, "no model"),
        ({"state": "ready", "restarts": 3, "pools": HEALTH["pools"]}, Level.WARN, "restarted 3 times"),
        ({"pools": {"state": "off", "reason": "stock engine"}}, Level.BAD, "stock engine"),
        ({"pools": {"state": "unknown", "reason": "starting"}}, Level.WARN, "starting"),
        ({**HEALTH, "declared": {"n_declared": 3, "n_failed": 2}}, Level.WARN, "2 of 3 declared pools"),
        ({**HEALTH, "gpu_share": {**SHARE, "enabled": False, "why": "it went"}}, Level.WARN, "not shared: it went"),
        (
            {**HEALTH, "declared": {"n_failed": 1, "pools": [{"name": "a", "outcome": "failed", "reason": "too long"}]}},
            Level.WARN,
            "declared pool a could not be made: too long",
        ),
        (
            {**HEALTH, "kv_disk": {"on": True, "paused": "No space left"}},
            Level.WARN,
            "not copied to disk at the moment: No space left",
        ),
        ({**HEALTH, "kv_disk": {"on": True, "paused": True}}, Level.WARN, "ask again with the key"),
        (changed(max_pools=0), Level.BAD, "without pool ids"),
        (changed(prefix_sharing="none", prefix_sharing_why="encoder"), Level.BAD, "encoder"),
        (changed(prefix_sharing="checkpoint"), Level.WARN, "exact length"),
        (changed(pools_price_bytes=5 * 2**20), Level.NOTE, "5.0 MiB"),
        (changed(kv={"unified": False}), Level.WARN, "split"),
        (changed(n_slots=1), Level.NOTE, "one slot"),
        (changed(context_shift=True), Level.WARN, "context shift"),
        (changed(cache_reuse=256), Level.WARN, "chunk reuse"),
        ({**HEALTH, "command": ["x", "--cache-reuse", "64"]}, Level.WARN, "chunk reuse"),
        ({**HEALTH, "command": ["x", "--no-cache-prompt"]}, Level.WARN, "--no-cache-prompt"),
        ({**HEALTH, "command": ["x", "--sleep-idle-seconds=5"]}, Level.WARN, "sleeps"),
    ],
)
def test_each_obstacle_is_found_with_a_remedy(health: dict[str, Any], level: Level, text: str) -> None:
    """The finding has its level and says what to change."""
    found = [finding for finding in diagnose(health) if finding.level is not Level.GOOD]
    assert [(finding.level, text in finding.text, bool(finding.remedy)) for finding in found] == [(level, True, True)]


def test_options_of_an_engine_that_tells_nothing_are_read_from_its_command() -> None:
    """F003: chunk reuse is warned about with a stock engine too."""
    assert [found.level for found in option_findings({}, ["./llama-server", "--cache-reuse", "8"])] == [Level.WARN]
    assert list(option_findings({}, ["./llama-server", "--cache-reuse", "0"])) == []


def answers(monkeypatch: pytest.MonkeyPatch, status: int, facts: object) -> None:
    def client(**options: Any) -> httpx.Client:
        return CLIENT(**options, transport=httpx.MockTransport(lambda _request: httpx.Response(status, json=facts)))

    monkeypatch.setattr(cli_http.httpx, "Client", client)


def test_tables_show_pools_and_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool and session is a line; `--json` is the proxy's answer."""
    pool = {
        "pool_id": 3,
        "name": "agents",
        "residency": "resident",
        "prefix_len": 40,
        "own_kv_bytes": 2**20,
        "n_hits": 1,
        "n_queries": 2,
    }
    pool |= {"n_running": 0, "sessions": [], "last_access_ts": 0.0, "reason": None, "parent": None, "pinned": False}
    answers(monkeypatch, 200, {"pools": [pool], "seq_ids_used": 1, "seq_ids_max": 16, "kv_bytes": 0})
    shown = CliRunner().invoke(app, ["pools"])
    assert (shown.exit_code, "agents" in shown.stdout, "1 of 16" in shown.stdout) == (0, True, True)
    assert '"pool_id": 3' in CliRunner().invoke(app, ["pools", "--json"]).stdout
    session = {"session_id": "a[b]", "pool_id": 3, "state": "idle", "n_streams": 0, "slot": 1, "ctx_used": 5, "ctx_total": 10}
    answers(monkeypatch, 200, {"sessions": [session, {**session, "session_id": None, "req": 9}]})
    shown = CliRunner().invoke(app, ["sessions"])
    assert "a[b]" in shown.stdout
    assert "(request 9)" in shown.stdout
    long = "s" * 200
    answers(monkeypatch, 200, {"sessions": [{**session, "session_id": long}]})
    assert CliRunner().invoke(app, ["sessions"]).stdout.splitlines()[1].split() == [long, "3", "idle", "0", "1", "5/10"]


def test_doctor_exits_1_when_pools_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy engine exits 0, one without pools 1 with the remedy."""
    answers(monkeypatch, 200, HEALTH)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    answers(monkeypatch, 200, {"pools": {"state": "off", "reason": "stock"}})
    shown = CliRunner().invoke(app, ["doctor"])
    assert (shown.exit_code, f"     → {BUILD}" in shown.stdout.splitlines()) == (1, True)


@pytest.mark.parametrize(
    ("status", "facts", "says"),
    [
        (401, {"error": {"message": "Invalid API Key"}}, "--api-key"),
        (501, {"error": {"message": "pools are off"}}, "pools are off"),
    ],
)
def test_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch, status: int, facts: object, says: str) -> None:
    """The proxy's own message reaches standard error, exit code 1."""
    answers(monkeypatch, status, facts)
    shown = CliRunner().invoke(app, ["pools"])
    assert (shown.exit_code, says in shown.stderr, shown.stderr.count("\n")) == (1, True, 1)


def test_nobody_there_is_said_with_the_way_out() -> None:
    """A closed port names the URL and how to start a proxy."""
    shown = CliRunner().invoke(app, ["pools", "--url", "http://127.0.0.1:1"])
    assert (shown.exit_code, "http://127.0.0.1:1" in shown.stderr, "--engine" in shown.stderr) == (1, True, True)


def test_what_lies_on_disk_is_said() -> None:
    """Where copies are kept; where they are not there is nothing to say."""
    disk = {"on": True, "paused": None, "n_copies": 3, "bytes_used": 5 * 2**20, "bytes_max": 2**30}
    assert [f.text for f in diagnose({**HEALTH, "kv_disk": disk}) if "disk" in f.text] == ["KV on disk: 3 copies, 5 of 1024 MiB"]
    assert not [f.text for f in diagnose({**HEALTH, "kv_disk": {"on": False, "paused": None}}) if "disk" in f.text]


def test_policies_are_said_where_there_are_any() -> None:
    """How many, how many act, and whom they stopped; advisory ones say what they would have done."""
    nothing = {"n_policies": 0, "n_enforced": 0, "max_running": None, "max_queued": None}
    counts = {"n_running": 3, "n_queued": 2, "n_refused": 7, "n_advised": 4}
    acts = {"n_policies": 2, "n_enforced": 1, "max_running": 8}

    def said(facts: dict[str, Any]) -> list[tuple[Level, str]]:
        found = diagnose({**HEALTH, "admission": {**nothing, **counts, **facts}})
        return [(one.level, one.text) for one in found if "admission" in one.text or "polic" in one.text]

    assert said({}) == []
    assert said(acts) == [
        (Level.GOOD, "admission: 2 policies, 1 enforced; 3 of at most 8 requests running; 2 wait, 7 were refused")
    ]
    advisory = said({"n_policies": 1})
    assert [level for level, _ in advisory] == [Level.GOOD, Level.NOTE]
    assert "nobody is held or refused; enforced, 4 would have been" in advisory[1][1]
