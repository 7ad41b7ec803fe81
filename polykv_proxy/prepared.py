"""What is known before anything runs: checked settings, the bound socket, where the engine will be and how it is started.

Law: starts nothing. What is wrong is a SettingsError; a socket and a folder are all that has to be let go of.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.api.context import Keys
from polykv_proxy.api.local_names import LocalNames
from polykv_proxy.cli_doctor import BUILD
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.engine import address as addresses
from polykv_proxy.engine.binary import find_binary, inspect_binary
from polykv_proxy.engine.command import EngineOptions, asks_for_split_cache, check_args, check_model, command, option_value, quoted
from polykv_proxy.engine.gguf_header import auto_pools
from polykv_proxy.errors import SettingsError
from polykv_proxy.exposure import is_loopback, key_file_notes, listening_notes
from polykv_proxy.key_file import read_key, read_keys
from polykv_proxy.pools_file import PoolsFile, read_pools_file
from polykv_proxy.ports import EngineAddress
from polykv_proxy.runtime.orders import Declared
from polykv_proxy.settings import Settings

_N_LISTENERS = 4


@dataclass(slots=True)
class Prepared:
    """What is known before anything runs: the bound socket, where the engine will be, and how it is started."""

    settings: Settings
    listener: socket.socket
    address: EngineAddress
    key: str
    keys: Keys
    api_prefix: str
    argv: list[str]
    env: dict[str, str]
    folder: addresses.RunFolder | None = None
    declared: Sequence[Declared] = ()
    policy: Policy | None = None

    @property
    def names(self) -> LocalNames | None:
        """By which our routes may be called. None, by any: a key is wanted that no strange page has, or others reach us anyway and
        nobody says by which names."""
        more = self.settings.allowed_hosts
        checked = not self.keys.api and (more or is_loopback(self.listener.getsockname()[0]))
        return LocalNames(frozenset(more)) if checked else None

    @property
    def notes(self) -> list[str]:
        """What whoever starts this should know: who can reach it, and that what was given says nothing."""
        notes = listening_notes(self.listener.getsockname()[0], has_keys=bool(self.keys.api))
        notes += key_file_notes((self.settings.api_key_file, self.settings.admin_key_file))
        if self.settings.allowed_hosts and self.keys.api:
            notes.append(
                "--allowed-hosts says nothing beside an API key: who has the key may call by any name, and no strange page has it"
            )
        if self.settings.pools is not None and not self.declared and self.policy is None:
            notes.append(f"--pools {self.settings.pools} declares nothing")
        return notes

    @property
    def engine_key(self) -> str | None:
        """The key with which we ask the engine ourselves, where it wants one."""
        return min(self.keys.api, default=None)

    @property
    def url(self) -> str:
        """Where clients reach us."""
        host, port = self.listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104 - shown only
        return f"http://{shown}:{port}"

    @property
    def state_dir(self) -> Path | None:
        """Folder of the journal; None with pools off."""
        if self.settings.off:
            return None
        if self.settings.state_dir is not None:
            return self.settings.state_dir
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(base) / "polykv" / str(self.listener.getsockname()[1])

    @property
    def remedy(self) -> str:
        """What helps when there are no pools."""
        settings = self.settings
        if settings.off:
            return "start it without"
        if settings.engine_url is None:
            return BUILD
        if settings.engine_key is None:
            return "give --engine-key, the LLAMA_ARG_POLYKV_KEY with which the engine was started"
        unlike = "either --engine-key is not the LLAMA_ARG_POLYKV_KEY with which it was started"
        return f"{unlike}, or it was not built by polykv-proxy build-engine"

    def listeners(self) -> list[socket.socket]:
        """The socket, several times: uvloop takes one connection of each in a turn of the loop, and turns are long under load."""
        return [self.listener, *(self.listener.dup() for _ in range(_N_LISTENERS - 1))]

    def close(self) -> None:
        """Let go of the socket and the folder."""
        self.listener.close()
        if self.folder is not None:
            self.folder.close()


def prepare(settings: Settings, env: Mapping[str, str] | None = None) -> Prepared:
    """Check everything that can be checked. Raises SettingsError."""
    env = os.environ if env is None else env
    file = read_pools_file(settings.pools) if settings.pools is not None else PoolsFile()
    keys = _keys(settings, env)
    if settings.engine_url is not None:
        address, prefix = addresses.from_url(settings.engine_url)
        key = settings.engine_key.get_secret_value() if settings.engine_key is not None else ""
        return Prepared(settings, _bind(settings), address, key, keys, prefix, [], {}, None, file.pools, file.admission)
    check_args(settings.engine_args)
    binary = inspect_binary(find_binary(settings.engine))
    check_model(settings.model, binary, settings.engine_args, env)
    named = settings.model or _path(option_value(settings.engine_args, ("-m", "--model")) or env.get("LLAMA_ARG_MODEL"))
    split = asks_for_split_cache(settings.engine_args, env)
    max_pools = 0 if settings.off else auto_pools(named, split=split) if settings.max_pools == "auto" else settings.max_pools
    prefix = option_value(settings.engine_args, ("--api-prefix",)) or env.get("LLAMA_ARG_API_PREFIX", "")
    listener = _bind(settings)
    folder = addresses.RunFolder(env)
    address = addresses.private_address(folder, unix_socket=binary.unix_socket)
    key = "" if settings.off else secrets.token_hex(16)
    options = EngineOptions(
        binary,
        address,
        key,
        max_pools,
        settings.model,
        ",".join(quoted(key) for key in keys.all) or None,
        settings.engine_args,
        settings.gpu_share,
        settings.gpu_share_weight,
        settings.gpu_share_key,
    )
    argv, engine_env = command(options, env)
    return Prepared(settings, listener, address, key, keys, prefix, argv, engine_env, folder, file.pools, file.admission)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        of_the_port = error.errno in {errno.EADDRINUSE, errno.EACCES}
        other = "choose another --port, or 0 for a free one" if of_the_port else "give an address of this machine as --host"
        raise SettingsError(f"--host {settings.host} --port {settings.port}: {error.strerror}; {other}") from error


def _keys(settings: Settings, env: Mapping[str, str]) -> Keys:
    """Ours, or those that the engine finds in its own environment: whoever needs a key there needs it here."""
    keys = settings.api_keys
    if settings.api_key_file is not None:
        keys += read_keys(settings.api_key_file, "--api-key-file")
    if not keys:
        keys = tuple(key for key in env.get("LLAMA_API_KEY", "").split(",") if key)
        if file := env.get("LLAMA_ARG_API_KEY_FILE"):
            keys += read_keys(Path(file), "LLAMA_ARG_API_KEY_FILE")
    return Keys(frozenset(keys), _admin_key(settings))


def _admin_key(settings: Settings) -> str | None:
    if settings.admin_key_file is not None:
        return read_key(settings.admin_key_file, "--admin-key-file")
    return settings.admin_key.get_secret_value() if settings.admin_key is not None else None


def _path(text: str | None) -> Path | None:
    return Path(text) if text and Path(text).is_file() else None
