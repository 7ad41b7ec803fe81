"""How many client connections the limit of open files leaves room for.

Law: a relayed request has a connection on either side; the engine inherits the limit, and copes with any.
"""

from __future__ import annotations

import contextlib
import logging
import resource

_log = logging.getLogger("polykv")
_RESERVE = 256
"""Files that are neither: the journal, listeners, calls of our own to the engine."""


def room_for(wanted: int) -> int:
    """As many connections as wanted, or as the system lets us have: the soft limit is raised as far as it goes."""
    files = 2 * wanted + _RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(OSError, ValueError):
            raised = files if hard == resource.RLIM_INFINITY else min(files, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    room = max(1, (soft - _RESERVE) // 2)
    _log.warning("%d connections at once, not %d: only %d files may be open (ulimit -n)", room, wanted, soft)
    return room
