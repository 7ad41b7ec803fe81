"""The engine's command line and environment.

Law: pure. Our options travel as environment variables, which an engine that does not know them ignores; keys never appear on the
command line, where every user of the machine could read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine.binary import EngineBinary
from polykv_proxy.errors import SettingsError
from polykv_proxy.ports import EngineAddress

_MODEL_FLAGS = frozenset("-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo --models-dir --models-preset".split())  # noqa: SIM905 - reads best as words
_MODEL_ENV = ("LLAMA_ARG_MODEL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODELS_DIR")
_OURS = {
    "--host": "the engine listens on a private socket; choose the public address with --host before the --",
    "--port": "the engine listens on a private socket; choose the public port with --port before the --",
    "--reuse-port": "the engine listens on a private socket",
    "--api-key": "every user of this machine can read it there; give it as --api-key or POLYKV_API_KEY before the --",
    "--api-key-file": "the proxy reads it too; give it as --api-key-file before the --",
    "--ssl-key-file": "the engine's socket is private; put TLS in front of the proxy",
    "--ssl-cert-file": "the engine's socket is private; put TLS in front of the proxy",
}
_DROPPED_ENV = (
    "LLAMA_ARG_HOST",
    "LLAMA_ARG_PORT",
    "LLAMA_ARG_SSL_KEY_FILE",
    "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_REUSE_PORT",
    "LLAMA_ARG_API_KEY_FILE",  # its keys reach the engine with all others, as LLAMA_API_KEY
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is started with. `max_pools` 0 means no pools, no `key` no verbs at all."""

    binary: EngineBinary
    address: EngineAddress
    key: str
    max_pools: int
    model: Path | None = None
    api_key: str | None = None
    args: Sequence[str] = ()
    gpu_share: str | None = None
    gpu_share_weight: float | None = None
    gpu_share_key: str | None = None


def command(options: EngineOptions, base_env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments (the program first) and environment."""
    argv = [str(options.binary.path)]
    if options.binary.llamafile_cli:
        argv += ["--server", "--nobrowser"]
    if options.model is not None:
        argv += ["-m", str(options.model)]
    if options.address.uds is not None:
        argv += ["--host", options.address.uds]
    else:
        argv += ["--host", options.address.host, "--port", str(options.address.port)]
    argv += options.args
    env = {name: value for name, value in base_env.items() if name not in _DROPPED_ENV and not name.startswith("POLYKV_")}
    env["LLAMA_ARG_ENDPOINT_METRICS"] = "1"
    if options.key:
        env["LLAMA_ARG_POLYKV_KEY"] = options.key
        env["LLAMA_ARG_POLYKV_MAX_POOLS"] = str(options.max_pools)
    for name in ("gpu_share", "gpu_share_weight", "gpu_share_key"):
        if (value := getattr(options, name)) is not None:
            env[f"LLAMA_ARG_{name.upper()}"] = str(value)
    if options.api_key:
        env["LLAMA_API_KEY"] = options.api_key
    return argv, env


def quoted(key: str) -> str:
    """A key as the engine reads one of a list: only a quotation mark at its beginning means something there."""
    return '"' + key.replace('"', '""') + '"' if key.startswith('"') else key


def check_args(args: Sequence[str]) -> None:
    """Refuse engine arguments that are the proxy's business. SettingsError names the argument and the remedy."""
    for arg in args:
        flag = arg.split("=", 1)[0]
        if flag in _OURS:
            raise SettingsError(f"engine argument {flag}: {_OURS[flag]}")


def check_model(model: Path | None, binary: EngineBinary, args: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse to start without a model: the engine would wait for one to be named in each request, and share nothing."""
    named = any(arg.split("=", 1)[0] in _MODEL_FLAGS or (arg.startswith("--") and arg.endswith("-default")) for arg in args)
    if model is None and not named and not binary.has_model and not any(env.get(name) for name in _MODEL_ENV):
        raise SettingsError(f"no model: add -m MODEL.gguf, as in: polykv-proxy --engine {binary.path} -m MODEL.gguf")
    if model is not None and not model.is_file():
        raise SettingsError(f"-m {model}: no such file")


def asks_for_split_cache(args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Do the engine's arguments, or else its environment, want a part of the cache for each slot?"""
    for arg in reversed(args):
        if arg in {"-no-kvu", "--no-kv-unified", "-kvu", "--kv-unified"}:
            return "no-" in arg
    return "LLAMA_ARG_NO_KV_UNIFIED" in env or env.get("LLAMA_ARG_KV_UNIFIED") in {"0", "off", "false", "disabled"}


def option_value(args: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of an engine option, the last one given."""
    value = None
    for n, arg in enumerate(args):
        if arg in names and n + 1 < len(args):
            value = args[n + 1]
        for name in names:
            if arg.startswith(name + "="):
                value = arg[len(name) + 1 :]
    return value
