"""What all commands share that talk to a running proxy: where it is, the key, one question, a table.

Law: failures are one line on standard error, exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from polykv_proxy.ui.paper import paper
from polykv_proxy.ui.top.remote import key_hint

DEFAULT_PORT = 8080
EXIT_FAILED = 1

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="POLYKV_URL", help="Where the proxy listens. Default: this machine, at --port.", show_default=False
    ),
]
Port = Annotated[
    int, typer.Option("--port", envvar="POLYKV_PORT", min=1, max=65535, help="Its port on this machine, where --url is not given.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="POLYKV_API_KEY", help="Key of the proxy.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the proxy's JSON as it came.")]

_TEXTS = frozenset({"session", "state"})


def where(url: str | None, port: int) -> str:
    """1. `--url` or POLYKV_URL: a scheme left out is http, and the /v1 of a base URL for clients is left out. 2. This machine, at
    `--port` or POLYKV_PORT.
    """
    if url is None:
        return f"http://127.0.0.1:{port}"
    url = url.rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def first_key(api_key: str | None) -> str | None:
    """POLYKV_API_KEY may hold all keys that the server takes."""
    return api_key.split(",")[0].strip() if api_key else None


def get(url: str, path: str, api_key: str | None) -> Any:
    """What a route answers."""
    return call("GET", url, path, api_key)


def call(
    method: str, url: str, path: str, api_key: str | None, body: object = None, *, options: Mapping[str, str] | None = None
) -> Any:
    """What a route answers; anything but a success ends the program. `options`: by which a field of the body is given."""
    key = first_key(api_key)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
            reply = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        start = "start it with `polykv-proxy --engine ./llamafile -m MODEL.gguf`"
        fail(f"nothing answers at {url} ({error}); {start}, or give --url or --port")
    try:
        facts = reply.json()
    except ValueError:
        fail(f"{url} answered {reply.status_code} without JSON; is it a polykv-proxy?")
    if reply.is_error:
        error_object = facts.get("error") if isinstance(facts, dict) else None
        message = error_object.get("message") if isinstance(error_object, dict) else reply.text
        option = (options or {}).get(str(error_object.get("param"))) if isinstance(error_object, dict) else None
        refused = reply.status_code == httpx.codes.UNAUTHORIZED
        hint = key_hint(given=key is not None) if refused else f" ({option})" if option else ""
        fail(f"{url}{path} answered {reply.status_code}: {message}{hint}")
    return facts


def fail(message: str) -> NoReturn:
    """One line on standard error, and the end."""
    sys.stderr.write(f"error: {plain(message)}\n")
    raise typer.Exit(EXIT_FAILED)


def plain(text: str) -> str:
    """What others wrote as one line of text: nothing in it commands a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def print_json(facts: object) -> None:
    """As it came."""
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")


def table(columns: Mapping[str, Callable[[Mapping[str, Any]], object]], items: Sequence[Mapping[str, Any]]) -> None:
    """A row for each item; what callers named is text, never markup."""
    shown = Table(box=None, header_style="bold")
    for column in columns:
        shown.add_column(column, justify="left" if column in _TEXTS else "right")
    for item in items:
        cells = [cell(item) for cell in columns.values()]
        shown.add_row(*["" if cell is None else escape(plain(str(cell))) for cell in cells])
    paper(soft_wrap=False).print(shown)
