"""Names that no stranger can point at this machine (DNS rebinding points a public name at a private address).

Law: pure; nothing is looked up.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_LOCAL_ENDS = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Ends of names that the public DNS never answers."""


@dataclass(frozen=True, slots=True)
class LocalNames:
    """Names that no stranger can point at this machine: a page that was loaded by such a name is not a stranger's.

    An address; a name without a dot, or below an end that exists only locally; one of `more`.
    """

    more: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Is this one of them?"""
        return "." not in name or name.endswith(_LOCAL_ENDS) or name in self.more or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
