"""Bodies of our own verbs, checked at the edge.

Law: an unknown field is an error that names it; so is a wrong type. What comes out is a value of the runtime.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from polykv_proxy.core.pools import NAME_RULE, valid_name
from polykv_proxy.core.prefix import INT32_MAX, as_tokens
from polykv_proxy.core.sessions import MAX_ID, valid_session_id
from polykv_proxy.core.verification import MAX_POSITIONS
from polykv_proxy.errors import ApiError
from polykv_proxy.gpu_share.layout import MAX_WEIGHT, MIN_WEIGHT
from polykv_proxy.runtime.orders import PoolSpec
from polykv_proxy.runtime.prefixes import Conversation
from polykv_proxy.runtime.verifier import CheckOrder

TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[StrictStr, Field(min_length=1)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Owner = Annotated[StrictStr, Field(min_length=1, max_length=MAX_ID)]
Body = TypeVar("Body", bound=BaseModel)
LEASE_S = 600.0
"""Seconds for which a pin holds unless it says otherwise."""
MAX_VALUES = 2_000_000
"""Values in one body that we parse: it holds up everybody's streams, by about a second at this bound."""
_COMPANIONS = (
    ("tools", "messages"),
    ("chat_template_kwargs", "messages"),
    ("n_tokens", "from_session"),
    ("rebuild", "from_session"),
)
_SOURCES = ("tokens", "prompt", "messages", "from_session")


class CreatePool(BaseModel):
    """`POST /polykv/pools`."""

    model_config = ConfigDict(extra="forbid")

    tokens: TokenIds | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    from_session: StrictStr | None = None
    n_tokens: Annotated[StrictInt, Field(ge=1, le=INT32_MAX)] | None = None
    rebuild: StrictBool | None = None
    name: StrictStr | None = None
    ttl_s: Seconds | None = None

    def spec(self) -> PoolSpec:
        """What it asks for. ApiError 400 names the field that does not fit the others."""
        given = [source for source in _SOURCES if getattr(self, source) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} came together" if given else "none came"
            raise _bad(given[1] if given else "tokens", f"give exactly one of {', '.join(_SOURCES)}; {what}")
        self._check_companions(given[0])
        if self.name is not None and not valid_name(self.name):
            raise _bad("name", f"name must match {NAME_RULE}, not {self.name!r:.80}")
        if self.from_session is not None and not valid_session_id(self.from_session):
            raise _bad("from_session", f"from_session must be a session id: 1 to {MAX_ID} printable ASCII characters")
        return PoolSpec(
            tokens=None if self.tokens is None else as_tokens(self.tokens),
            prompt=self.prompt,
            conversation=self._conversation(),
            from_session=self.from_session,
            n_tokens=self.n_tokens,
            rebuild=bool(self.rebuild),
            name=self.name,
            ttl_s=self.ttl_s,
        )

    def _check_companions(self, source: str) -> None:
        for field, needs in _COMPANIONS:
            if getattr(self, field) is not None and source != needs:
                raise _bad(field, f"{field} goes with {needs}, not with {source}")

    def _conversation(self) -> Conversation | None:
        if self.messages is None:
            return None
        extra = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return Conversation(self.messages, {key: value for key, value in extra.items() if value is not None})


class ForkPool(CreatePool):
    """`POST /polykv/pools/{id}/fork`: the full prefix of the child, and where it leaves its parent."""

    branch_pos: StrictInt | None = None

    def spec(self) -> PoolSpec:
        """What it asks for. ApiError 400."""
        if self.branch_pos is not None and self.branch_pos < 1:
            raise _bad(
                "branch_pos", "branch_pos is the number of tokens taken from the parent, at least 1; leave it out to take all"
            )
        return replace(super().spec(), branch_pos=self.branch_pos)


class CompactPool(CreatePool):
    """`POST /polykv/pools/{id}/compact`: the full prefix of the new pool, how much of the old one it keeps, and who moves."""

    keep_to: Annotated[StrictInt, Field(ge=1)] | None = None
    migrate: list[StrictStr] = Field(default_factory=list, fail_fast=True)

    def spec(self) -> PoolSpec:
        """What it asks for. ApiError 400."""
        if self.from_session is not None:
            raise _bad("from_session", "a compacted prefix is a new text: give tokens, prompt or messages")
        if len(set(self.migrate)) != len(self.migrate):
            raise _bad("migrate", "migrate names a session twice")
        return replace(super().spec(), keep_to=self.keep_to)


class PinPool(BaseModel):
    """`POST /polykv/pools/{id}/pin`."""

    model_config = ConfigDict(extra="forbid")

    owner: Owner | None = None
    lease: Seconds | Literal["none"] = LEASE_S


class UnpinPool(BaseModel):
    """`POST /polykv/pools/{id}/unpin`."""

    model_config = ConfigDict(extra="forbid")

    owner: Owner | None = None


class RenewPool(BaseModel):
    """`POST /polykv/pools/{id}/renew`."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: Seconds | None = None


class NoFields(BaseModel):
    """`POST /polykv/pools/{id}/evict` and `flush`."""

    model_config = ConfigDict(extra="forbid")


class SetWeight(BaseModel):
    """`POST /gpu/weight`."""

    model_config = ConfigDict(extra="forbid")

    weight: Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False, strict=True)]


class VerifyPool(BaseModel):
    """`POST /polykv/pools/{id}/verify`."""

    model_config = ConfigDict(extra="forbid")

    positions: Annotated[list[StrictInt], Field(min_length=1, max_length=MAX_POSITIONS, fail_fast=True)] | None = None
    n_positions: Annotated[StrictInt, Field(ge=1, le=MAX_POSITIONS)] | None = None

    def order(self) -> CheckOrder:
        """What it asks for. ApiError 400."""
        if self.positions is not None and self.n_positions is not None:
            raise _bad("n_positions", "give positions or n_positions, not both")
        if self.positions is not None:
            return CheckOrder(positions=tuple(self.positions))
        return CheckOrder() if self.n_positions is None else CheckOrder(n_positions=self.n_positions)


def parse(model: type[Body], raw: bytes) -> Body:
    """A body of one of our verbs. ApiError 400 says which field is wrong and why."""
    fields = json_object(raw)
    for name in fields:
        if name not in model.model_fields:
            raise _unknown(name, model)
    _check_characters(raw, fields)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first(error) from error


def json_object(raw: bytes) -> dict[str, Any]:
    """A body that is one JSON object. ApiError 400."""
    check_values(raw)
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError("invalid_request", "the body must be a JSON object")
    return fields


def check_values(raw: bytes) -> None:
    """ApiError 413 for more values than any prompt needs, before JSON is parsed."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ApiError("body_too_large", f"the body has more than {MAX_VALUES} values; no prompt needs so many")


def _check_characters(raw: bytes, fields: dict[str, Any]) -> None:
    """JSON escapes can spell half a character, which is in no text and which the engine cannot read."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return
    for field, value in fields.items():
        try:
            json.dumps([field, value], ensure_ascii=False).encode()
        except RecursionError as error:
            raise _bad(field, f"{field} is nested too deeply") from error
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise _bad(
                ascii(field)[1:-1], f"{ascii(field)[1:-1]} holds {half}, an unpaired surrogate, which is no character"
            ) from error


def _unknown(name: str, model: type[BaseModel]) -> ApiError:
    shown = ascii(name)[1:-1][:80]
    known = f"known are {', '.join(model.model_fields)}" if model.model_fields else "this verb takes none"
    return _bad(shown, f"unknown field {shown}; {known}")


def _first(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_input=False)[0]
    field, *parts = problem["loc"]
    path = str(field) + "".join(f"[{part}]" for part in parts if isinstance(part, int))
    return _bad(path, f"{path}: {problem['msg']}")


def _bad(field: str, message: str) -> ApiError:
    return ApiError("invalid_request", message, param=field)
