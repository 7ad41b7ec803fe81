"""A proxy that answers capacity as a test says, for what needs no pools."""

from __future__ import annotations

from typing import Any

import httpx

from opencoti_langgraph import PoolClient

FREE = {"can_admit": True, "reason": "ok", "headroom_sessions": 4, "mean_active_tps": 9.5, "seq": 1}
FULL = {**FREE, "can_admit": False, "reason": "projected mean tps below floor", "arm": "floor", "headroom_sessions": 0}


class Room:
    """Reports, one after another; the last stays. `asked` are the paths and queries."""

    def __init__(self, *reports: dict[str, Any] | int) -> None:
        self.reports = list(reports)
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url.raw_path, "ascii"))
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        if isinstance(report, int):
            return httpx.Response(report, json={"error": {"code": "not_found" if report == 404 else "engine_unavailable"}})
        return httpx.Response(200, json=report)

    @property
    def client(self) -> PoolClient:
        return PoolClient(http_client=httpx.Client(transport=httpx.MockTransport(self), base_url="http://proxy"))


class Clock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)
