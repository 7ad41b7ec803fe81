"""What a request would share, without running it.

Law: decides as an attach does, on the same records; changes nothing. The engine may still lower what is said here, never raise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from polykv_proxy.core.attach import Course, Wish, decide_attach
from polykv_proxy.core.pools import Pool, PoolTree
from polykv_proxy.core.prefix import Tokens, common_prefix


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one prompt: the pool it was held against, how much agrees, how much would be shared, and why not more.

    `attaches`: a request like this would attach to it. `pool` None: no pool has a token in common with it.
    """

    pool: Pool | None
    attaches: bool
    n_matched: int
    n_shared: int
    why_not: str | None


def would_share(tree: PoolTree, wish: Wish, prompt: Tokens, *, exact_only: bool) -> Verdict:
    """The verdict on one prompt. `exact_only`: this engine may be able to share whole pools only. ApiError as an attach has them.

    1. a pool is named and takes requests: held against it
    2. no pool is named, or an optional one is not there: held against the pool with the longest match, and not attached
    """
    attachment = decide_attach(tree, wish)
    if attachment.pool is None:
        best = tree.match(prompt)
        if best is None:
            return Verdict(None, attaches=False, n_matched=0, n_shared=0, why_not="no pool begins with a token of this prompt")
        named = "its pool is not there" if attachment.course is Course.UNSHARED else "the request names no pool"
        pool = tree.get(best.key)
        return Verdict(pool, attaches=False, n_matched=best.length, n_shared=0, why_not=f"{named}; this is the longest match")
    pool = attachment.pool
    matched = common_prefix(pool.tokens, prompt)
    shared = max(0, min(matched, int(prompt.size) - 1, pool.prefix_len if wish.explicit_p is None else wish.explicit_p))
    if attachment.course is Course.UNSHARED:
        why = f"the pool is {pool.residency} ({pool.reason}) and is not rebuilt by a request"
        return Verdict(pool, attaches=False, n_matched=matched, n_shared=0, why_not=why)
    return Verdict(
        pool, attaches=shared > 0, n_matched=matched, n_shared=shared, why_not=_less(pool, prompt, matched, shared, exact_only)
    )


def _less(pool: Pool, prompt: Tokens, matched: int, shared: int, exact_only: bool) -> str | None:
    """Why not all of the pool, in a sentence."""
    if shared == pool.prefix_len:
        return None
    if not matched:
        return "the first token differs"
    if matched < min(pool.prefix_len, prompt.size):
        why = f"tokens differ at position {matched}"
    elif shared < matched and shared == prompt.size - 1:
        why = "the prompt ends within the pool, and its last token is always computed"
    elif shared < matched:
        why = "shared_prefix_n_tokens asks for less"
    else:
        why = "the prompt ends within the pool"
    return f"{why}; this engine may share less here, it needs a whole pool or a checkpoint of it" if exact_only else why
