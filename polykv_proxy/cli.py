"""The command line: parses, calls bootstrap, exits with a code.

Law: no decisions here. Without a sub-command the proxy serves; what follows a bare `--` belongs to the engine.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polykv_proxy import cli_build, cli_remote
from polykv_proxy.errors import SettingsError
from polykv_proxy.exposure import command_line_notes
from polykv_proxy.settings import Settings, default_text, flag, load_settings

_ENGINE_ARGS = "polykv.engine_args"
EXIT_SETTINGS = 2
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings click along, or not, as its versions please
_OF_THE_ENGINE = "; an option of the engine goes behind a bare --, as in: polykv-proxy -m MODEL.gguf -- -c 8192"


class _Group(TyperGroup):
    """Takes the arguments after a bare `--` away before they could be read as a sub-command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ENGINE_ARGS] = args[:at], tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if getattr(error, "possibilities", True) in (None, [], ()):  # no such option, and none that is spelt nearly so
                error.message += _OF_THE_ENGINE  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=_Group,
    name="polykv-proxy",
    no_args_is_help=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

cli_remote.register(app)
cli_build.register(app)

_ENGINE, _PUBLIC, _POOLS, _TIMES = "Engine", "Listening and keys", "Pools and sessions", "Times and limits"


def _option(name: str, *flags: str, panel: str, **more: Any) -> Any:
    default = default_text(name)
    shown = f" Default: {default}." if default not in {None, "false"} else ""
    return typer.Option(
        *(flags or ("--" + name.replace("_", "-"),)),
        help=f"{Settings.model_fields[name].description}{shown}",
        rich_help_panel=panel,
        show_default=False,
        **more,
    )


@app.callback(invoke_without_command=True)
def serve(  # noqa: PLR0917 - typer reads options from the signature and passes them by name
    ctx: typer.Context,
    engine: Annotated[Path | None, _option("engine", panel=_ENGINE)] = None,
    model: Annotated[Path | None, _option("model", "-m", "--model", panel=_ENGINE)] = None,
    engine_url: Annotated[str | None, _option("engine_url", panel=_ENGINE)] = None,
    engine_key: Annotated[str | None, _option("engine_key", panel=_ENGINE)] = None,
    engine_log: Annotated[Path | None, _option("engine_log", panel=_ENGINE)] = None,
    host: Annotated[str | None, _option("host", panel=_PUBLIC)] = None,
    port: Annotated[int | None, _option("port", panel=_PUBLIC)] = None,
    api_key: Annotated[str | None, _option("api_key", panel=_PUBLIC)] = None,
    api_key_file: Annotated[Path | None, _option("api_key_file", panel=_PUBLIC)] = None,
    admin_key: Annotated[str | None, _option("admin_key", panel=_PUBLIC)] = None,
    admin_key_file: Annotated[Path | None, _option("admin_key_file", panel=_PUBLIC)] = None,
    allowed_hosts: Annotated[str | None, _option("allowed_hosts", panel=_PUBLIC, metavar="NAME,…")] = None,
    default_pool: Annotated[str | None, _option("default_pool", panel=_POOLS)] = None,
    pools: Annotated[Path | None, _option("pools", panel=_POOLS)] = None,
    max_pools: Annotated[str | None, _option("max_pools", panel=_POOLS, metavar="auto|N")] = None,
    max_pool_objects: Annotated[int | None, _option("max_pool_objects", panel=_POOLS)] = None,
    pool_grace_s: Annotated[float | None, _option("pool_grace_s", panel=_POOLS)] = None,
    session_ttl_s: Annotated[float | None, _option("session_ttl_s", panel=_POOLS)] = None,
    kv_disk_bytes: Annotated[str | None, _option("kv_disk_bytes", panel=_POOLS, metavar="SIZE")] = None,
    verify_interval_s: Annotated[float | None, _option("verify_interval_s", panel=_POOLS)] = None,
    state_dir: Annotated[Path | None, _option("state_dir", panel=_POOLS)] = None,
    gpu_share: Annotated[str | None, _option("gpu_share", panel=_ENGINE, metavar="on|off")] = None,
    gpu_share_weight: Annotated[float | None, _option("gpu_share_weight", panel=_ENGINE)] = None,
    gpu_share_key: Annotated[str | None, _option("gpu_share_key", panel=_ENGINE)] = None,
    off: Annotated[bool, _option("off", "--off", panel=_POOLS)] = False,
    max_running: Annotated[int | None, _option("max_running", panel=_TIMES)] = None,
    max_queued: Annotated[int | None, _option("max_queued", panel=_TIMES)] = None,
    body_limit_bytes: Annotated[int | None, _option("body_limit_bytes", panel=_TIMES)] = None,
    keep_alive_s: Annotated[float | None, _option("keep_alive_s", panel=_TIMES)] = None,
    client_stall_s: Annotated[float | None, _option("client_stall_s", panel=_TIMES)] = None,
    max_connections: Annotated[int | None, _option("max_connections", panel=_TIMES)] = None,
    start_idle_s: Annotated[float | None, _option("start_idle_s", panel=_TIMES)] = None,
    no_progress_s: Annotated[float | None, _option("no_progress_s", panel=_TIMES)] = None,
    stop_grace_s: Annotated[float | None, _option("stop_grace_s", panel=_TIMES)] = None,
    drain_grace_s: Annotated[float | None, _option("drain_grace_s", panel=_TIMES)] = None,
    log_level: Annotated[str | None, _option("log_level", panel=_TIMES, metavar="debug|info|warning|error")] = None,
    log_format: Annotated[str | None, _option("log_format", panel=_TIMES, metavar="text|json")] = None,
    access_log: Annotated[bool, _option("access_log", "--access-log", panel=_TIMES)] = False,
    otel: Annotated[bool, _option("otel", "--otel", panel=_TIMES)] = False,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings.", show_default=False)] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serve an OpenAI-compatible port in front of a llamafile / llama.cpp engine, with prompt prefixes shared between agents.

    polykv-proxy --engine ./llamafile -m MODEL.gguf [-- ENGINE ARGS...]

    Every setting can also be a POLYKV_... variable or a line of the --config file; a flag wins over both.
    """
    if version:
        typer.echo(f"polykv-proxy {installed_version('polykv-proxy')}")
        raise typer.Exit
    if ctx.invoked_subcommand is not None:
        _check_nothing_before(ctx, ctx.invoked_subcommand)
        return
    given = dict(ctx.params)
    flags = {
        name: value for name, value in given.items() if name in Settings.model_fields and value is not None and value is not False
    }
    if ctx.meta.get(_ENGINE_ARGS):
        flags["engine_args"] = ctx.meta[_ENGINE_ARGS]
    from polykv_proxy.bootstrap import run  # noqa: PLC0415 - heavy; --help and sub-commands do without

    settings = load_settings(flags, config)
    sys.stderr.write("".join(f"note: {line}\n" for line in command_line_notes(flags)))
    raise typer.Exit(run(settings))


def _check_nothing_before(ctx: typer.Context, command: str) -> None:
    """Options of the server mean nothing to a command that asks a running one."""
    for name, value in ctx.params.items():
        if value is not None and value is not False:
            raise typer.BadParameter(
                f"{flag(name)} before {command} is for the server; write polykv-proxy {command} and its options"
            )


def main() -> None:
    """Entry point. Bad settings are one line on standard error and exit code 2."""
    try:
        app()
    except SettingsError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        sys.exit(EXIT_SETTINGS)


if __name__ == "__main__":
    main()
