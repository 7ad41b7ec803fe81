"""All settings: one frozen object, the only reader of flags, environment and file.

Law: every field has a default, its unit in its name or text, and a row in docs/configuration.md (a test compares them). Precedence:
flag, then `POLYKV_…` variable, then file, then default. What is wrong is found here, before anything starts, and said in one line.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from polykv_proxy.core.pools import NAME_RULE, is_pool_number, valid_name
from polykv_proxy.errors import SettingsError

ENV_PREFIX = "POLYKV_"
SECRETS = frozenset({"engine_key", "api_key", "admin_key"})
_SWITCHES = frozenset({"off", "access_log", "otel"})
KEY_RULE = "a key is one or more printable ASCII characters without spaces and commas"
_KEY = re.compile(r"[!-+\--~]+")


class Settings(BaseSettings):
    """Settings of one proxy. Field descriptions are the reference."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, allow_inf_nan=False
    )

    engine: Path | None = Field(None, description="Engine binary to run and watch. Default: ./llamafile, else one on PATH.")
    engine_url: str | None = Field(
        None, description="Use an engine that runs already, http://HOST:PORT or unix:/PATH; it is not supervised."
    )
    engine_key: SecretStr | None = Field(
        None, description="Key of an engine at --engine-url (its LLAMA_ARG_POLYKV_KEY); without it pools are off there."
    )
    engine_args: tuple[str, ...] = Field(
        (), description="Further arguments of the engine; on the command line, all that follows a bare --."
    )
    engine_log: Path | None = Field(None, description="File to which everything that the engine prints is appended.")
    model: Path | None = Field(None, description="Model file (GGUF) for the engine.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    state_dir: Path | None = Field(
        None, description="Folder of the journal. Default: $XDG_STATE_HOME/polykv/PORT, that is ~/.local/state/polykv/PORT."
    )
    api_key: SecretStr | None = Field(
        None, description="Key that clients must send, several separated by commas. The engine checks it too."
    )
    api_key_file: Path | None = Field(
        None, description="File of API keys, one a line, # begins a comment. They count beside those of --api-key."
    )
    admin_key: SecretStr | None = Field(None, description="Key for administrative verbs. Default: the API key suffices.")
    admin_key_file: Path | None = Field(None, description="File with the admin key, in place of --admin-key.")
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names by which /polykv/* may be called without a key, separated by commas, beside addresses, localhost and "
        "names that only exist locally. Checked on loopback, and wherever names are given.",
    )
    default_pool: str | None = Field(None, description="Pool (id or name) to which requests that name none are attached.")
    pools: Path | None = Field(
        None, description="File of pools that are made before the proxy is ready (YAML; docs/pools.md, Declared pools)."
    )
    off: bool = Field(False, description="Relay only: no pools, no sessions, nothing added to any reply.")
    max_pools: int | Literal["auto"] = Field(
        "auto",
        description="Resident pools the engine reserves room for, 0 to 255; auto is 16 on plain attention in one cache, else 4.",
    )
    max_pool_objects: int = Field(1024, ge=1, description="Pools that may exist, resident or not.")
    pool_grace_s: float = Field(
        30.0, ge=0, description="Seconds for which a pool is not evicted to make room after the last user of it, or below it, left."
    )
    kv_disk_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes that copies of pools' KV may take on disk, in STATE_DIR/kv, such as 20GiB. Default: no copies.",
    )
    gpu_share: Literal["on", "off"] | None = Field(
        None, description="Whether the engine takes turns with others on its device, on or off. Default: on where it has a GPU."
    )
    gpu_share_weight: float | None = Field(
        None,
        ge=0.001,
        le=1000,
        description="The engine's share of its device beside others that compute, relative to their weights. Default: 1.",
    )
    gpu_share_key: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Engines with one key share one device. Default: made of the device's id; engines without a GPU need one.",
    )
    session_ttl_s: float = Field(600.0, gt=0, description="Seconds after which an idle session ends.")
    max_running: int | None = Field(
        None, ge=1, description="Requests that may compute at once, on all generating routes together. Default: no bound."
    )
    max_queued: int | None = Field(
        None, ge=0, description="Requests that may wait to be admitted; more are refused with 429. Default: no bound."
    )
    body_limit_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Largest body in bytes of routes that are scanned for pools; no limit elsewhere."
    )
    keep_alive_s: float = Field(75.0, gt=0, description="Seconds for which an idle client connection is kept.")
    client_stall_s: float = Field(
        60.0, gt=0, description="Seconds that a client may take for the head of a request, and between two pieces of its body."
    )
    max_connections: int = Field(
        4096, ge=1, description="Client connections at once; more are refused with 503. Bounded by the limit of open files too."
    )
    start_idle_s: float = Field(
        60.0, gt=0, description="Seconds without any progress after which a starting engine is given up; loading has no limit."
    )
    no_progress_s: float | None = Field(
        None,
        ge=1,
        description="Seconds without any progress of the engine after which requests that wait for it are ended. Default: never.",
    )
    verify_interval_s: float | None = Field(
        None, gt=0, description="Seconds after which an idle pool is verified again while the engine is idle. Default: never."
    )
    stop_grace_s: float = Field(10.0, ge=0, description="Seconds the engine has to end by itself before it is killed.")
    drain_grace_s: float = Field(30.0, ge=0, description="Seconds that running requests have to finish when the proxy is stopped.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="How much the proxy says on standard error."
    )
    log_format: Literal["text", "json"] = Field("text", description="Lines for people, or a JSON object a line.")
    access_log: bool = Field(False, description="A line in the log for each request that is over; never bodies or queries.")

    otel: bool = Field(
        False, description="Send OpenTelemetry traces to where the OTEL_EXPORTER_OTLP_… variables say; needs polykv-proxy[otel]."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bools(cls, value: object, info: ValidationInfo) -> object:
        """`true` would be taken for 1."""
        if isinstance(value, bool) and info.field_name not in _SWITCHES:
            raise ValueError("give a value, not true or false")
        return value

    @field_validator("max_pools", mode="before")
    @classmethod
    def _max_pools(cls, value: object) -> object:
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255):
            return value
        raise ValueError("write auto, or a number from 0 to 255")

    @field_validator("kv_disk_bytes", mode="wrap")
    @classmethod
    def _size(cls, value: object, parse: ValidatorFunctionWrapHandler) -> object:
        try:
            return parse(value)
        except ValidationError:
            raise ValueError("write a size above 0, such as 20GiB or a number of bytes; leave it out for no copies") from None

    @field_validator("api_key", "admin_key", "engine_key")
    @classmethod
    def _keys(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        text = value.get_secret_value() if value is not None else "-"
        keys = _split(text) if info.field_name == "api_key" else [text]
        if not keys or not all(is_key(key) for key in keys):
            raise ValueError(f"{KEY_RULE}; leave it out to have none")
        return value

    @field_validator("default_pool")
    @classmethod
    def _pool(cls, value: str | None) -> str | None:
        if value is not None and not valid_name(value) and not is_pool_number(value):
            raise ValueError(f"write the id of a pool or a name ({NAME_RULE})")
        return value

    @field_validator("engine_args", mode="before")
    @classmethod
    def _args(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _hosts(cls, value: object) -> object:
        return tuple(_split(value.lower())) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.admin_key is not None and self.admin_key_file is not None:
            raise ValueError("--admin-key-file takes the place of --admin-key: give one of them")
        if self.engine_url is not None:
            for name in ("engine", "model", "engine_log"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} starts an engine, --engine-url uses a running one: give one of them"
                    )
            for name in ("gpu_share", "gpu_share_weight", "gpu_share_key"):
                if getattr(self, name) is not None:
                    variable = f"LLAMA_ARG_{name.upper()}"
                    raise ValueError(
                        f"--{name.replace('_', '-')} goes to an engine that is started, --engine-url uses a running one: "
                        f"start that with {variable}"
                    )
            if self.engine_args:
                raise ValueError("arguments after -- start an engine, --engine-url uses a running one: give one of them")
        for name in ("default_pool", "pools", "kv_disk_bytes", "max_running", "max_queued"):
            if self.off and getattr(self, name) is not None:
                why = "relays only, {} does more" if name.startswith("max_") else "switches pools off, {} needs them"
                raise ValueError(f"--off {why.format('--' + name.replace('_', '-'))}: give one of them")
        return self

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, each one."""
        return tuple(_split(self.api_key.get_secret_value())) if self.api_key is not None else ()


def is_key(text: str) -> bool:
    """Can this be a key? See KEY_RULE."""
    return _KEY.fullmatch(text) is not None


def _split(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def load_settings(flags: Mapping[str, Any], file: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Settings from given flags (those not given left out), the environment and a TOML file. Raises SettingsError."""
    env = os.environ if env is None else env
    given = _read_file(file)
    variables = {name: value for name in Settings.model_fields if (value := env.get(variable(name)))}

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del env_settings, dotenv_settings, file_secret_settings
            return init_settings, InitSettingsSource(settings_cls, variables), InitSettingsSource(settings_cls, given)

    try:
        return Loaded(**flags)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(dict(one), flags, variables, file) for one in error.errors())) from error


def flag(name: str) -> str:
    """The command line flag of a field."""
    return "-- ARGS" if name == "engine_args" else "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.upper()


def default_text(name: str) -> str | None:
    """The default of a field for people, None where it has none."""
    value = Settings.model_fields[name].default
    return None if value is None or value == () else str(value).lower() if isinstance(value, bool) else str(value)


def reference() -> str:
    """The table of all settings, in Markdown: the one in docs/configuration.md."""
    lines = ["| flag | variable | in the file | default | meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = default_text(name)
        shown = "none" if default is None else f"`{default}`"
        lines.append(f"| `{flag(name)}` | `{variable(name)}` | `{name}` | {shown} | {field.description} |")
    return "\n".join(lines)


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {file}: not valid TOML: {error}") from error


def _explain(error: dict[str, Any], flags: Mapping[str, Any], variables: Mapping[str, str], file: Path | None) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if name not in Settings.model_fields:
        return f"{file}: unknown setting {name!r}; docs/configuration.md lists them"
    if name in flags:
        where = flag(name)
    elif name in variables:
        where = variable(name)
    else:
        where = f"{file}: {name}"
    secret = name in SECRETS
    return f"{where}{'' if secret else ' ' + str(error.get('input'))}: {message}"
