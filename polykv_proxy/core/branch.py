"""Where a child leaves its parent: the contract of a fork, token by token.

Law: a child's `[0, branch_pos)` is its parent's, always; nothing else makes a child. Values in, a position or an ApiError out.
"""

from __future__ import annotations

from polykv_proxy.core.pools import Pool
from polykv_proxy.core.prefix import Tokens, common_prefix
from polykv_proxy.errors import ApiError


def branch_position(parent: Pool, tokens: Tokens, wanted: int | None, param: str = "branch_pos") -> int:
    """D for a child with the full prefix `tokens`; `wanted` None takes the longest common prefix.

    1. D is above what both have in common: 409 with the first differing position
    2. D is 0: 400, that is a root
    3. nothing is left after D: 400, the parent holds it already
    """
    shared = common_prefix(parent.tokens, tokens)
    if wanted is not None and wanted > shared:
        raise ApiError(
            "prefix_mismatch",
            f"branch_pos is {wanted}, but pool {parent.pool_id} and the given prefix agree only up to position {shared}: "
            f"{_why(parent, tokens, shared)}; leave branch_pos out to branch there",
            param=param,
            extra={"first_differing_position": shared, "parent_prefix_len": parent.prefix_len, "prefix_len": int(tokens.size)},
        )
    branch = shared if wanted is None else wanted
    if branch == 0:
        raise ApiError(
            "invalid_request",
            f"a fork shares at least one token with its parent; create a pool of its own beside pool {parent.pool_id}",
            param=param,
            extra={"first_differing_position": shared},
        )
    if branch >= tokens.size:
        raise ApiError(
            "invalid_request",
            f"nothing is left after position {branch}: pool {parent.pool_id} holds this whole prefix; attach to it instead",
            param=param,
            extra={"prefix_len": int(tokens.size), "parent_prefix_len": parent.prefix_len},
        )
    return branch


def _why(parent: Pool, tokens: Tokens, shared: int) -> str:
    if shared == parent.prefix_len:
        return "the pool ends there"
    return "the given prefix ends there" if shared == tokens.size else "the tokens differ there"
