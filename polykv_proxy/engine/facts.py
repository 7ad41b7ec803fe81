"""What any engine says about itself on its public routes: for people, not for decisions.

Law: asked once at the start; an engine that does not say leaves None.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

import httpx2

from polykv_proxy.ports import EngineAddress

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PublicFacts:
    """Model name, context of one slot, number of slots."""

    model: str | None = None
    n_ctx_slot: int | None = None
    n_slots: int | None = None


async def ask_facts(address: EngineAddress, api_key: str | None, prefix: str = "") -> PublicFacts:
    """Read `/props`."""
    base = "http://engine" if address.uds is not None else f"http://{address.host}:{address.port}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx2.AsyncHTTPTransport(uds=address.uds, trust_env=False, verify=False)  # no TLS to an engine
    async with httpx2.AsyncClient(
        transport=transport, base_url=base, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as client:
        try:
            props = (await client.get(f"{prefix}/props")).json()
        except (httpx2.HTTPError, ValueError):
            return PublicFacts()
    if not isinstance(props, dict):
        return PublicFacts()
    name = props.get("model_path") or props.get("model_alias")
    generation = props.get("default_generation_settings")
    n_ctx = generation.get("n_ctx") if isinstance(generation, dict) else None
    slots = props.get("total_slots")
    return PublicFacts(
        PurePath(name).name if isinstance(name, str) and name else None,
        n_ctx if isinstance(n_ctx, int) else None,
        slots if isinstance(slots, int) else None,
    )
