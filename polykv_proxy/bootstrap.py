"""The composition root: settings become adapters, the runtime, the relay and the application; the one place where rooms meet.

Law: all checks come before anything starts (prepared.py); what is started is stopped in reverse, also when a start fails half way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.metadata
import logging
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
import uvloop
from rich.console import Console

from polykv_proxy import open_files
from polykv_proxy.api.access_log import AccessLog
from polykv_proxy.api.additions import Additions
from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext
from polykv_proxy.api.gate import PoolGate
from polykv_proxy.api.relay import Relay, RelayLimits, RelayProtocol, Routes, UpstreamPool
from polykv_proxy.api.request_ids import RequestIds
from polykv_proxy.cli_doctor import option_findings
from polykv_proxy.engine import probe
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.facts import ask_facts
from polykv_proxy.engine.late_wakeups import loop_errors
from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.status import EngineState, EngineStatus
from polykv_proxy.engine.supervisor import EngineStartError, Supervisor, SupervisorLimits
from polykv_proxy.engine.watcher import EngineWatcher
from polykv_proxy.errors import ApiError, SettingsError
from polykv_proxy.observability import logs
from polykv_proxy.observability.metrics import Metrics, RelayFacts
from polykv_proxy.prepared import Prepared, prepare
from polykv_proxy.runtime.progress import ProgressWatch
from polykv_proxy.runtime.runtime import Runtime, RuntimeOptions
from polykv_proxy.settings import Settings
from polykv_proxy.ui.page import add_page
from polykv_proxy.ui.startup import EngineFacts, StartupView

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from polykv_proxy.api.traces import Traces

_log = logging.getLogger("polykv")
_KNOWN_S = 5.0
_CLOSE_S = 2
EXIT_AT_ONCE = 130

Engine: TypeAlias = Supervisor | EngineWatcher


def run(settings: Settings) -> int:
    """Serve until told to stop; the exit code. Raises SettingsError before anything was started."""
    spoken = logs.set_up(settings.log_level, settings.log_format)
    prepared = prepare(settings)
    for note in prepared.notes:
        _log.warning("%s", note)
    try:
        return uvloop.run(Proxy(prepared, Console(file=spoken, highlight=False, soft_wrap=True)).serve())
    finally:
        prepared.close()


class Proxy:
    """One running proxy. `console` is where it speaks to people."""

    def __init__(self, prepared: Prepared, console: Console) -> None:
        self._prepared = prepared
        self._settings = prepared.settings
        self._engine: Engine = self._make_engine()
        self._view = StartupView(lambda: self._engine.status, self._engine.output.tail, console)
        self._pool = UpstreamPool()
        limits = RelayLimits(
            scanned_body=self._settings.body_limit_bytes,
            keep_alive_s=self._settings.keep_alive_s,
            stall_s=self._settings.client_stall_s,
            connections=open_files.room_for(self._settings.max_connections),
        )
        prefix = prepared.api_prefix.encode()
        extended = frozenset() if self._settings.off else frozenset({prefix + b"/metrics"})
        self._relay = Relay(self._pool, routes=Routes(api_prefix=prefix, own_exact=extended), limits=limits)
        self._relay.echoes = not self._settings.off
        self._access = AccessLog() if self._settings.access_log else None
        self._traces = _traces() if self._settings.otel else None
        self._relay.observers += [one for one in (self._access, self._traces) if one is not None]
        self._watch: ProgressWatch | None = None
        self._metrics: Metrics | None = None
        self._warm = not prepared.declared
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> int:
        """Start, wait for a signal, drain, stop."""
        prepared, settings = self._prepared, self._settings
        asyncio.get_running_loop().set_exception_handler(loop_errors)
        client = self._client()
        options = RuntimeOptions.of(settings, prepared.state_dir, prepared.declared, prepared.policy, prepared.remedy)
        runtime = await Runtime.start(client, options)
        if not settings.off:
            gate = PoolGate(runtime, settings.default_pool, prepared.keys)
            self._relay.gate = gate if self._traces is None else self._traces.gate(gate)
            self._relay.additions = Additions(runtime, prepared.api_prefix.encode(), settings.default_pool)
            self._metrics = self._measure(runtime)
        self._relay.on_post = runtime.hub.on_wanted
        self._relay.on_lost = runtime.admission.doubt
        if settings.no_progress_s is not None:
            self._watch = ProgressWatch(runtime.hub, settings.no_progress_s, self._relay.owed, self._doubt)
            runtime.hub.spawn(self._watch.run())
        self._engine.observers += [self._door, functools.partial(_tell, runtime)]
        health = functools.partial(self._health, runtime)
        context = ApiContext(runtime, prepared.keys, health, settings.body_limit_bytes, settings.default_pool, hosts=prepared.names)
        if self._metrics is not None:
            context = replace(context, metrics=self._metrics.page, api_prefix=prepared.api_prefix)
        server, serving = self._open(context)
        gc.collect()
        gc.freeze()  # what the start has made stays: to look at all of it again holds up every stream for tens of milliseconds
        self._listen_to_signals(runtime)
        try:
            code = await self._until_stopped(runtime, serving)
        finally:
            await self._close(server, serving, runtime)
        return EXIT_AT_ONCE if self._hurry.is_set() else code

    # parts

    def _make_engine(self) -> Engine:
        prepared, settings = self._prepared, self._settings
        prefix, api_key = prepared.api_prefix, prepared.engine_key
        if settings.engine_url is not None:
            return EngineWatcher(prepared.address, prefix=prefix, api_key=api_key)
        limits = SupervisorLimits(idle_s=settings.start_idle_s, stop_grace_s=settings.stop_grace_s)
        output = OutputLog(file=settings.engine_log)
        return Supervisor(
            prepared.argv, prepared.env, prepared.address, prefix=prefix, api_key=api_key, output=output, limits=limits
        )

    def _client(self) -> EngineClient:
        prepared = self._prepared
        options: dict[str, Any] = {"api_key": prepared.engine_key, "api_prefix": prepared.api_prefix}
        if self._traces is None:
            return EngineClient(prepared.address, prepared.key, **options)
        from polykv_proxy.engine.traced_client import TracedClient  # noqa: PLC0415 - wants the extra

        return TracedClient(self._traces.tracer, prepared.address, prepared.key, **options)

    def _measure(self, runtime: Runtime) -> Metrics:
        relay = self._relay
        facts = RelayFacts(relay.tally, lambda: len(relay.running), lambda: relay.n_generating)
        metrics = Metrics(runtime, lambda: self._engine.status, facts)
        self._engine.observers.append(metrics.engine_changed)
        runtime.hub.spawn(metrics.run())
        return metrics

    def _open(self, context: ApiContext) -> tuple[_Server, asyncio.Task[None]]:
        http: Any = functools.partial(RelayProtocol, relay=self._relay)
        app = build_app(context)
        add_page(app)
        watched: ASGIApp = app
        for watcher in (self._traces, self._access):
            watched = watcher.around(watched) if watcher is not None else watched
        config = uvicorn.Config(
            RequestIds(watched),
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        server = _Server(config)
        return server, asyncio.get_running_loop().create_task(server.serve(sockets=self._prepared.listeners()))

    # life

    async def _until_stopped(self, runtime: Runtime, serving: asyncio.Task[None]) -> int:
        self._engine.start()
        stop = asyncio.ensure_future(self._stop.wait())
        up = asyncio.ensure_future(self._come_up(runtime))
        try:
            await asyncio.wait([stop, up, serving], return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
                await asyncio.wait([stop, serving], return_when=asyncio.FIRST_COMPLETED)
        except EngineStartError as error:
            self._view.failed(str(error), error.lines)
            return 1
        finally:
            stop.cancel()
            up.cancel()
            await asyncio.gather(stop, up, return_exceptions=True)
        await self._drain(runtime)
        return 0

    async def _come_up(self, runtime: Runtime) -> None:
        """The engine, then the declared pools, then the word that it is ready. EngineStartError when it does not start."""
        shown = asyncio.ensure_future(self._view.progress())
        try:
            await self._engine.first_boot()
            await self._warm_up(runtime)
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
        await self._announce(runtime)

    async def _warm_up(self, runtime: Runtime) -> None:
        """Until the declared pools are there, or cannot be; an engine that does not say whether it has pools is not waited for."""
        if not self._settings.off:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_S):
                    await runtime.link.known()
        if self._warm:
            return
        self._view.doing = runtime.declared.progress
        if runtime.hub.hello is not None or runtime.hub.absent is not None:
            await runtime.declared.settled.wait()
        self._warm = True
        self._door(self._engine.status)

    async def _announce(self, runtime: Runtime) -> None:
        hello = runtime.hub.hello
        if self._settings.off:
            pools = "off (--off)"
        elif hello is None:
            absent = runtime.hub.absent
            pools = f"off: {absent}; {runtime.hub.remedy}" if absent else "off: the engine has not said whether it has them"
        else:
            pools = f"{hello.max_pools}, prefix sharing: {hello.prefix_sharing} ({hello.prefix_sharing_why})"
        if self._prepared.declared:
            pools += f"; {runtime.declared.summary()}"
        facts = await ask_facts(self._prepared.address, self._prepared.engine_key, self._prepared.api_prefix)
        wants_key = self._prepared.engine_key is not None
        engine = hello.model_dump() if hello is not None else {}
        warnings = [f"{found.text}; {found.remedy}" for found in option_findings(engine, self._prepared.argv)]
        warnings += self._prepared.notes + runtime.declared.failures()
        shown = EngineFacts(facts.model, facts.n_ctx_slot, facts.n_slots, pools, self._prepared.api_prefix, wants_key, warnings)
        self._view.ready(self._prepared.url, shown)

    async def _drain(self, runtime: Runtime) -> None:
        self._relay.drain(self._settings.drain_grace_s)
        runtime.admission.drain()
        runtime.end_streams()
        self._engine.drain()
        if self._relay.running:
            self._view.note(f"stopping: {len(self._relay.running)} requests are still running (once more to stop at once)")
        drained = asyncio.ensure_future(self._relay.drained())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait([drained, hurry], timeout=self._settings.drain_grace_s, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        hurry.cancel()
        self._relay.cut("draining", "The proxy is shutting down.")

    async def _close(self, server: _Server, serving: asyncio.Task[None], runtime: Runtime) -> None:
        runtime.end_streams()
        server.should_exit = True
        server.force_exit = self._hurry.is_set()
        await asyncio.gather(serving, return_exceptions=True)
        await runtime.stop()
        await self._engine.stop(at_once=self._hurry.is_set())
        self._pool.drop_idle()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def _listen_to_signals(self, runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._signalled, runtime)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has said that it goes on
            loop.add_signal_handler(signal.SIGHUP, self._stop.set)  # shell and kernel may both send it: no second signal

    def _signalled(self, runtime: Runtime) -> None:
        if self._stop.is_set():
            self._hurry.set()
            self._engine.kill()
            runtime.keeper.hurry()
        self._stop.set()

    def _door(self, status: EngineStatus) -> None:
        """The relay's door follows the engine's state."""
        if status.state is EngineState.READY and self._warm:
            self._pool.open(self._prepared.address)
        elif status.state is EngineState.READY:
            self._pool.shut(ApiError("engine_starting", "The declared pools are being made.", retry_after_s=2))
        elif status.state is EngineState.STARTING:
            self._pool.shut(ApiError("engine_starting", "The engine is starting: the model is loading.", retry_after_s=2))
        elif status.state is EngineState.FAILED:
            wait = max(1.0, (status.retry_ts or 0.0) - time.time())
            self._pool.shut(ApiError("engine_unavailable", f"The engine is away: {status.reason}.", retry_after_s=wait))
        elif status.state is not EngineState.DRAINING:
            self._pool.shut(ApiError("draining", "The proxy is shutting down.", retry_after_s=5))

    async def _doubt(self, reason: str) -> None:
        """Requests were ended because the engine stood still: one that does not even say that it lives is started anew."""
        prepared = self._prepared
        answer = await probe.health(prepared.address, prepared.api_prefix, prepared.engine_key)
        if answer is None and self._engine.status.state is EngineState.READY:
            _log.error("the engine does not answer /health either: it is started anew")
            self._engine.restart(f"{reason}, and did not answer /health")

    def _health(self, runtime: Runtime) -> dict[str, object]:
        status = self._engine.status
        warming = status.state is EngineState.READY and not self._warm
        return {
            "state": EngineState.STARTING.value if warming else status.state.value,
            "since_ts": status.since_ts,
            "supervised": status.supervised,
            "boots": status.boots,
            "restarts": status.restarts,
            "reason": runtime.declared.progress() if warming else status.reason,
            "exit_code": status.exit_code,
            "retry_ts": status.retry_ts,
            "requests_running": len(self._relay.running),
            "no_progress": self._watch.facts() if self._watch is not None else None,
            "pid": status.pid,
            "command": self._prepared.argv,
            "last_lines": self._engine.output.tail(20),
        }


class _Server(uvicorn.Server):
    """A server that leaves signals to the proxy."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _traces() -> Traces:
    """Spans that go out by OTLP. SettingsError without the extra."""
    try:
        from polykv_proxy.api import traces  # noqa: PLC0415 - wants the extra

        return traces.Traces(traces.otlp(), importlib.metadata.version("polykv-proxy"))
    except ImportError as error:
        raise SettingsError(f"--otel needs the extra otel ({error}); pip install 'polykv-proxy[otel]'") from error


def _tell(runtime: Runtime, status: EngineStatus) -> None:
    """What the engine's state means to the runtime: a process of ours that is not there holds no KV."""
    if status.supervised and status.state in {EngineState.STARTING, EngineState.FAILED}:
        runtime.link.gone(status.reason or "the engine is starting")
    if status.state is EngineState.STOPPING:
        runtime.link.expect_end()
    runtime.hub.telemetry.engine_state(status.state.value, status.reason)
    runtime.link.poke()
