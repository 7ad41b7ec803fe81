"""Who can reach this proxy and its keys, in words for the person who starts it.

Law: pure but for the modes of key files; forbids nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polykv_proxy.key_file import readable_by_others
from polykv_proxy.settings import SECRETS, flag, variable


def is_loopback(address: str) -> bool:
    """Is this numeric address one that only this machine reaches?"""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening_notes(address: str, *, has_keys: bool) -> list[str]:
    """What listening on this address means."""
    if is_loopback(address):
        return []
    if not has_keys:
        return [
            f"everyone who can reach {address} can use the model, read the prompts in pools and change them: there is no API key; "
            "give --api-key-file, or listen on --host 127.0.0.1"
        ]
    return [f"keys and prompts cross the network to {address} as plain text; put TLS in front (docs/security.md)"]


def key_file_notes(files: Iterable[Path | None]) -> list[str]:
    """Key files that others may read."""
    exposed = [file for file in files if file is not None and readable_by_others(file)]
    return [f"other users of this machine can read the keys in {file}; chmod 600 {file}" for file in exposed]


def command_line_notes(flags: Mapping[str, Any]) -> list[str]:
    """Keys that were given where every user of the machine can see them."""
    given = [name for name in flags if name in SECRETS]
    files = {"api_key": " or --api-key-file", "admin_key": " or --admin-key-file"}
    return [
        f"{flag(name)} on the command line can be read by every user of this machine; use {variable(name)}{files.get(name, '')}"
        for name in given
    ]
