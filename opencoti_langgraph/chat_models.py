"""`OpencotiChatModel`: LangChain's chat model for a polykv-proxy.

Law: what `BaseChatOpenAI` does it does here too; ours are the pool and session of a request, what the reply says of them, a history
that keeps the KV prefix, and errors by type. Plain llama-servers are served as well, without the extras.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils import from_env, secret_from_env
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, SecretStr, model_validator

from opencoti_langgraph import content_blocks
from opencoti_langgraph._version import __version__
from opencoti_langgraph.chat_errors import StreamCutError, typed
from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import PoolUnsupportedError
from opencoti_langgraph.extras import CarryingChunk, extras_of, flat, metadata_of, reasoning_in, reasoning_of, tool_name
from opencoti_langgraph.results import PoolRef
from opencoti_langgraph.transport import per_loop_client
from opencoti_langgraph.wire import DEFAULT_URL

BODY = ("pool_id", "session_id", "overcommit", "chat_template_kwargs")
"""Our fields of a request. Constructor, `bind`, call, configurable fields and middleware's `model_settings` may give them."""

content_blocks.register()


class OpencotiChatModel(BaseChatOpenAI):
    """A chat model whose requests name a pool and a session.

    ```python
    model = OpencotiChatModel(base_url="http://127.0.0.1:8080/v1", pool_id="agents", session_id="writer")
    reply = model.invoke("Where is the keel?")
    reply.usage_metadata["input_token_details"]["cache_read"]   # prompt tokens that were not computed
    reply.response_metadata["session_tps"]                      # tokens per second as this session had them
    ```

    `OPENCOTI_BASE_URL` and `OPENCOTI_API_KEY` are read where nothing is given; nothing of `OPENAI_*` is.
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(default="default", alias="model")
    openai_api_key: SecretStr | Callable[[], str] | None = Field(
        alias="api_key", default_factory=secret_from_env("OPENCOTI_API_KEY", default="not-needed")
    )
    openai_api_base: str | None = Field(
        alias="base_url", default_factory=from_env("OPENCOTI_BASE_URL", default=f"{DEFAULT_URL}/v1")
    )
    openai_proxy: str | None = None
    stream_usage: bool | None = True
    """The base turns it off for any server but OpenAI's."""
    use_responses_api: bool | None = False
    max_retries: int | None = 0
    """The SDK would sleep through a 429 and hide the backpressure; BackpressureMiddleware waits in the open."""
    stream_chunk_timeout: float | None = Field(default=None, exclude=True)
    """A request that waits for room sends nothing meanwhile: that is no fault."""

    pool_id: PoolRef | None = None
    """The pool by id or name."""
    session_id: str | None = None
    """The session: its turns find their own KV again."""
    overcommit: bool | None = None
    """True: start even where the pool's floor would be broken."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For the model's template (`{"enable_thinking": False}`); pools for these chats need the same."""
    n_ctx: int | None = None
    """Tokens that one session may have; middleware that watches the fill of the context needs it."""
    stable_tools: bool = True
    """Send tools sorted by name, so that their order does not change the KV prefix."""

    _pool_client: PoolClient | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _set_opencoti_async_client(cls, values: Any) -> Any:
        """Connections by event loop, unless the caller brings a client."""
        if isinstance(values, dict) and not values.get("http_async_client") and not values.get("async_client"):
            return {**values, "http_async_client": per_loop_client()}
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _drop_openai_identity(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Organisation and project of an OpenAI account are in the environment for OpenAI, not for a local server."""
        made = make(values)
        if not isinstance(values, dict) or not {"openai_organization", "organization"} & values.keys():
            made.openai_organization = None
        for client in (made.root_client, made.root_async_client):
            if client is not None:
                client.organization, client.project = made.openai_organization, None
        return made

    @model_validator(mode="after")
    def _set_opencoti_version(self) -> Self:
        self._add_version("opencoti-langgraph", __version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "opencoti-chat"

    @property
    def pool_client(self) -> PoolClient:
        """A client of the same proxy, with the same key."""
        if self._pool_client is None:
            key = self.openai_api_key.get_secret_value() if isinstance(self.openai_api_key, SecretStr) else None
            self._pool_client = PoolClient(self.openai_api_base or DEFAULT_URL, api_key=None if key == "not-needed" else key)
        return self._pool_client

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(tool_calling=True, structured_output=True)
        if self.n_ctx is not None:
            profile["max_input_tokens"] = self.n_ctx
        return profile

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": content_blocks.PROVIDER})

    def _get_request_payload(self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """The body: our fields beside it, history as the engine generated it, tools in a fixed order."""
        own = {key: value for key in BODY if (value := getattr(self, key)) is not None}
        call = kwargs.pop("extra_body", None) or {}
        own |= {key: value for key in BODY if (value := kwargs.pop(key, None)) is not None}
        messages = self._convert_input(input_).to_messages()
        payload = super()._get_request_payload(messages, stop=stop, **kwargs)
        if body := {**(self.extra_body or {}), **own, **call}:
            payload["extra_body"] = body
        for message, sent in zip(messages, payload["messages"], strict=True):
            sent["content"] = flat(sent.get("content"))
            if reasoning := reasoning_of(message):
                sent["reasoning_content"] = reasoning
        if payload.get("tools"):
            _settle_tools(payload, ordered=self.stable_tools)
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        raw = response if isinstance(response, dict) else response.model_dump(exclude={"choices"}, warnings=False)
        metadata = metadata_of(extras_of(raw))
        choices = response["choices"] if isinstance(response, dict) else response.choices
        for generation, choice in zip(result.generations, choices, strict=True):
            message = choice["message"] if isinstance(choice, dict) else choice.message.model_extra or {}
            if reasoning := reasoning_in(message):
                generation.message.additional_kwargs["reasoning_content"] = reasoning
            generation.message.response_metadata |= {**metadata, "model_provider": content_blocks.PROVIDER}
        if result.llm_output is not None:
            result.llm_output["model_provider"] = content_blocks.PROVIDER
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is None:
            return None
        event = chunk.get("chunk") or chunk  # wrapped where a response_format was asked for
        choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
        if isinstance(made.message, AIMessageChunk):
            if reasoning := reasoning_in(choice.get("delta") or {}):
                made.message.additional_kwargs["reasoning_content"] = reasoning
            made.message.response_metadata["model_provider"] = content_blocks.PROVIDER
        return CarryingChunk(
            message=made.message,
            generation_info=made.generation_info,
            extras=extras_of(event),
            finished=choice.get("finish_reason") is not None,
        )

    def _get_generation_chunk_from_completion(self, completion: openai.BaseModel) -> ChatGenerationChunk:
        """The last chunk of a stream with a response format: what came in pieces already is not told again."""
        made = super()._get_generation_chunk_from_completion(completion)
        made.message.additional_kwargs.pop("reasoning_content", None)
        return made

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _typed_errors():
            return super()._generate(messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _typed_errors():
            return await super()._agenerate(messages, stop, run_manager, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        told = _Told()
        with _typed_errors():
            for chunk in super()._stream(messages, stop, run_manager, **kwargs):
                yield told.took(chunk)
        last = told.last(self.output_version)
        if run_manager:
            run_manager.on_llm_new_token("", chunk=last)
        yield last

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        told = _Told()
        with _typed_errors():
            async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
                yield told.took(chunk)
        last = told.last(self.output_version)
        if run_manager:
            await run_manager.on_llm_new_token("", chunk=last)
        yield last

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers in a schema.

        `json_schema` forces the form by a grammar and leaves the prompt, and so the pool's prefix, as it is; the model does not see
        descriptions of fields. `function_calling` shows the schema to the model as a tool, which changes the prefix.
        """
        return super().with_structured_output(schema, method=method, **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.pool_client.tokenize(text, add_special=False)

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        **_: Any,
    ) -> int:
        """Tokens of the prompt that these messages (and tools) make, exactly, as the server counts."""
        body = self.prompt_body(messages, tools)
        try:
            return self.pool_client.count_tokens(body)
        except PoolUnsupportedError:  # a plain llama-server
            return len(self.pool_client.tokenize(self.pool_client.render(body)))

    def prompt_body(
        self, messages: LanguageModelInput, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None
    ) -> dict[str, Any]:
        """The part of a request that makes its prompt, as this model would send it: `messages`, `tools`, `chat_template_kwargs`."""
        offered: dict[str, Any] = {"tools": [convert_to_openai_tool(tool) for tool in tools]} if tools else {}
        payload = self._get_request_payload(messages, **offered)
        kwargs = payload.get("extra_body", {}).get("chat_template_kwargs")
        parts = {"messages": payload["messages"], "tools": payload.get("tools"), "chat_template_kwargs": kwargs}
        return {key: value for key, value in parts.items() if value}


ChatOpencoti = OpencotiChatModel
"""The name that LangChain's convention wants."""


class _Told:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self._extras: dict[str, Any] = {}
        self._finished = False

    def took(self, chunk: ChatGenerationChunk) -> ChatGenerationChunk:
        """Note what a chunk carries; pass it on."""
        if isinstance(chunk, CarryingChunk):
            self._extras |= chunk.extras
            self._finished = self._finished or chunk.finished
        return chunk

    def last(self, output_version: str | None) -> ChatGenerationChunk:
        """The chunk that ends the stream. StreamCutError when the engine never said that it had finished."""
        if not self._finished:
            raise StreamCutError("the stream ended before the engine had finished; the answer is not whole")
        metadata = {**metadata_of(self._extras), "model_provider": content_blocks.PROVIDER}
        if output_version == "v1":
            metadata["output_version"] = "v1"
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata, chunk_position="last"))


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except openai.APIError as error:
        if (better := typed(error)) is error:
            raise
        raise better from error


def _settle_tools(payload: dict[str, Any], *, ordered: bool) -> None:
    """Tools in a fixed order; a choice of one is that tool alone, and required: the engine knows words only."""
    choice = payload.get("tool_choice")
    if isinstance(choice, dict):
        payload["tools"] = [tool for tool in payload["tools"] if tool_name(tool) == tool_name(choice)] or payload["tools"]
        payload["tool_choice"] = "required"
    if ordered:
        payload["tools"] = sorted(payload["tools"], key=tool_name)
