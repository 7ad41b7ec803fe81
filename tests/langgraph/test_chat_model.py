"""The chat model on a scripted engine: what goes out, what comes back, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError, ModelConnectionError, ModelRateLimitError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import BaseModel

from opencoti_langgraph import (
    ChatConflictError,
    ChatOpencoti,
    ChatPoolNotFoundError,
    ChatUnavailableError,
    ContextExceededError,
    OpencotiChatModel,
    PoolSaturatedError,
    ProxyUnreachableError,
    StreamCutError,
)
from tests.fakes.scripted_chat import TIMINGS, Answer
from tests.fakes.scripted_server import N_CACHED, Scripted
from tests.langgraph.sailing import ascend, dive

QUESTION = "Where is the keel?"


class Find(BaseModel):
    """What was found."""

    place: str


def model(engine: Scripted, **fields: Any) -> OpencotiChatModel:
    return OpencotiChatModel(base_url=engine.url, model="toy", **fields)


def streamed(bound: Any, ask: Any = QUESTION) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for chunk in bound.stream(ask):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


async def astreamed(bound: Any, ask: Any = QUESTION) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    async for chunk in bound.astream(ask):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


WAYS = {
    "invoke": lambda bound, ask=QUESTION: bound.invoke(ask),
    "stream": streamed,
    "ainvoke": lambda bound, ask=QUESTION: asyncio.run(bound.ainvoke(ask)),
    "astream": lambda bound, ask=QUESTION: asyncio.run(astreamed(bound, ask)),
}


@pytest.fixture(params=WAYS)
def say(request: pytest.FixtureRequest) -> Any:
    """One of the four ways to call a model."""
    return WAYS[request.param]


def test_the_convention_s_name_is_the_same_class() -> None:
    """LangChain's integrations are called Chat…"""
    assert ChatOpencoti is OpencotiChatModel


@pytest.mark.parametrize("version", [None, "v1"])
def test_every_way_tells_the_same(engine: Scripted, say: Any, version: str | None) -> None:
    """Text, usage with cache reads, timings, pool, session, speed, backpressure and headroom: whole or streamed, sync or async."""
    reply = say(model(engine, pool_id="agents", session_id="s", output_version=version))
    assert reply.text == "The keel lies below."
    assert reply.usage_metadata["input_token_details"]["cache_read"] == N_CACHED
    told = reply.response_metadata
    assert told["timings"] == TIMINGS
    assert (told["pool_id"], told["session_id"], told["session_tps"]) == ("agents", "s", 21.5)
    assert (told["backpressure"], told["headroom"]) == ("held", {"sessions": 2, "ctx_tokens": 900})
    assert told["model_provider"] == "opencoti"


def test_timings_with_every_chunk_add_up_to_the_last(engine: Scripted) -> None:
    """`timings_per_token` sends differing numbers with each chunk: the last count, and nothing crashes or is summed."""
    engine.timings_always = True
    whole = streamed(model(engine, pool_id="agents"))
    assert whole.response_metadata["timings"] == TIMINGS
    assert whole.response_metadata["pool_id"] == "agents"


@pytest.mark.parametrize("give", ["constructor", "bind", "call", "configurable", "copy"])
def test_pool_and_session_come_from_everywhere(engine: Scripted, give: str) -> None:
    """Constructor, bind, call, configurable fields and copies; the closest to the call wins."""
    ours: dict[str, Any] = {"pool_id": 7, "session_id": "me", "overcommit": True}
    base = model(engine, pool_id=1, session_id="other")
    match give:
        case "constructor":
            model(engine, **ours).invoke(QUESTION)
        case "bind":
            base.bind(**ours).invoke(QUESTION)
        case "call":
            base.invoke(QUESTION, **ours)
        case "copy":
            base.model_copy(update=ours).invoke(QUESTION)
        case "configurable":
            fields = {name: ConfigurableField(id=name) for name in ours}
            base.configurable_fields(**fields).invoke(QUESTION, {"configurable": ours})
    assert {name: engine.bodies[-1].get(name) for name in ours} == ours


def test_extra_body_is_merged(engine: Scripted) -> None:
    """Instance, our fields and the call each add theirs; the base would replace."""
    bound = model(engine, extra_body={"cache_prompt": True, "min_p": 0.1}, pool_id=3)
    bound.invoke(QUESTION, extra_body={"min_p": 0.2})
    sent = engine.bodies[-1]
    assert (sent["cache_prompt"], sent["min_p"], sent["pool_id"]) == (True, 0.2, 3)


@pytest.mark.parametrize("version", [None, "v1"])
def test_a_second_turn_begins_with_the_first(engine: Scripted, say: Any, version: str | None) -> None:
    """Reasoning goes back, text lists are flattened, tool calls keep their form: the history is what the engine generated."""
    engine.brain = lambda body: Answer("Down there.", reasoning="think of ships. ")
    bound = model(engine, output_version=version)
    history: list[BaseMessage] = [SystemMessage("Be terse."), HumanMessage(QUESTION)]
    history += [say(bound, history), HumanMessage("And the mast?")]
    say(bound, history)
    first, second = engine.bodies[-2]["messages"], engine.bodies[-1]["messages"]
    assert second[: len(first)] == first
    turn = second[len(first)]
    assert turn["content"] == "Down there."
    assert turn["reasoning_content"].strip() == "think of ships."


def test_reasoning_is_a_standard_block(engine: Scripted, say: Any) -> None:
    """Under `reasoning_content` as under `reasoning`."""
    engine.brain = lambda body: Answer("Below.", reasoning="think of ships. ")
    blocks = say(model(engine, output_version="v1")).content_blocks
    assert [block["type"] for block in blocks] == ["reasoning", "text"]


@pytest.mark.parametrize("version", [None, "v1"])
def test_a_streamed_tool_call_is_in_the_blocks(engine: Scripted, say: Any, version: str | None) -> None:
    """Index 0 of the call does not collide with the block of reasoning or text."""
    engine.brain = lambda body: Answer("Diving.", reasoning="deep. ", calls=[("dive", {"depth": 3}), ("ascend", {"height": 4})])
    reply = say(model(engine, output_version=version).bind_tools([dive, ascend]))
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("dive", {"depth": 3}), ("ascend", {"height": 4})]
    kinds = [block["type"] for block in reply.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call"]


def test_one_model_serves_one_loop_after_another(engine: Scripted) -> None:
    """A second `asyncio.run` meets no connection of a closed loop."""
    bound = model(engine)
    assert {asyncio.run(bound.ainvoke(QUESTION)).text for _ in range(3)} == {"The keel lies below."}


def test_nothing_of_openai_s_environment_leaks(engine: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, organisation and project are for OpenAI; a key of ours is sent."""
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "secret-of-openai")
    monkeypatch.setenv("OPENAI_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    for way in WAYS.values():
        way(model(engine, api_key="ours"))
    assert "secret-of-openai" not in json.dumps(engine.headers)
    assert {sent["authorization"] for sent in engine.headers} == {"Bearer ours"}


def test_structured_output_keeps_the_prefix_by_default(engine: Scripted) -> None:
    """The schema goes as a grammar, not as a tool; `function_calling` is there for who asks."""
    assert model(engine).with_structured_output(Find).invoke("Find 'the keel'") == Find(place="the keel")
    assert "tools" not in engine.bodies[-1]
    assert engine.bodies[-1]["response_format"]["type"] == "json_schema"
    called = model(engine).with_structured_output(Find, method="function_calling").invoke("Find 'the keel'")
    assert called == Find(place="the keel")
    assert engine.bodies[-1]["tools"][0]["function"]["name"] == "Find"
    assert engine.bodies[-1]["tool_choice"] == "required"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_streamed_schema_carries_usage_and_facts_once(engine: Scripted, say: Any) -> None:
    """Where the SDK wraps each chunk, and tells the whole at the end once more, nothing is lost or doubled."""
    engine.brain = lambda body: Answer('{"place": "here"}', reasoning="hm. ")
    reply = say(model(engine, pool_id="agents").bind(response_format=Find))
    assert json.loads(reply.text) == {"place": "here"}
    assert reply.response_metadata["pool_id"] == "agents"
    assert reply.usage_metadata["input_token_details"]["cache_read"] == N_CACHED
    assert reply.additional_kwargs["reasoning_content"].strip() == "hm."


def test_tools_go_in_a_fixed_order(engine: Scripted) -> None:
    """However they are bound, the prompt is the same."""
    for tools in ([dive, ascend], [ascend, dive]):
        model(engine).bind_tools(tools).invoke(QUESTION)
    assert engine.bodies[-1]["tools"] == engine.bodies[-2]["tools"]
    assert [one["function"]["name"] for one in engine.bodies[-1]["tools"]] == ["ascend", "dive"]
    model(engine, stable_tools=False).bind_tools([dive, ascend]).invoke(QUESTION)
    assert [one["function"]["name"] for one in engine.bodies[-1]["tools"]] == ["dive", "ascend"]


def test_a_choice_of_one_tool_is_that_tool_alone(engine: Scripted) -> None:
    """The engine takes an object for `auto`: only what it understands is sent."""
    reply = model(engine).bind_tools([ascend, dive], tool_choice="dive").invoke("dive(30)")
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("dive", {"depth": 30})]
    assert engine.bodies[-1]["tool_choice"] == "required"


def test_saturation_is_everybody_s_rate_limit_error(engine: Scripted, say: Any) -> None:
    """Ours, the SDK's and LangChain's at once, with all that the proxy said; and it comes after one request, not after retries."""
    with pytest.raises(PoolSaturatedError) as full:
        say(model(engine, pool_id="full"))
    error = full.value
    assert isinstance(error, openai.RateLimitError)
    assert isinstance(error, ModelRateLimitError)
    assert error.is_retryable
    assert (error.retry_after, error.headroom_sessions, error.mean_active_tps, error.pool_id, error.arm) == (7, 0, 4.5, 3, "floor")
    assert len(engine.bodies) == 1


def test_overflow_is_what_summarising_middleware_waits_for(engine: Scripted, say: Any) -> None:
    """LangChain's ContextOverflowError, with the counts."""
    with pytest.raises(ContextOverflowError) as over:
        say(model(engine, pool_id="ctx"))
    assert isinstance(over.value, ContextExceededError)
    assert isinstance(over.value, openai.BadRequestError)
    assert (over.value.n_prompt_tokens, over.value.n_ctx) == (5000, 4096)


def test_a_released_pool_is_named(engine: Scripted, say: Any) -> None:
    """The caller can tell it from a model that is not there."""
    with pytest.raises(ChatPoolNotFoundError, match="no pool gone"):
        say(model(engine, pool_id="gone"))


@pytest.mark.parametrize(("pool", "kind"), [("midfail", ChatUnavailableError), ("midfull", PoolSaturatedError)])
def test_an_error_in_the_middle_of_a_stream_is_typed(engine: Scripted, pool: str, kind: type[Exception]) -> None:
    """The event has no status; what it says decides."""
    with pytest.raises(kind):
        streamed(model(engine, pool_id=pool))
    with pytest.raises(kind):
        asyncio.run(astreamed(model(engine, pool_id=pool)))


def test_a_cut_stream_is_no_answer(engine: Scripted) -> None:
    """Half a text without an end is an error, not a short text."""
    with pytest.raises(StreamCutError):
        streamed(model(engine, pool_id="cut"))
    assert ChatConflictError.__mro__[-1] is object


def test_nobody_at_home_is_named() -> None:
    """Where nothing listens the error is ours, LangChain's and the SDK's, and says where."""
    alone = OpencotiChatModel(base_url="http://127.0.0.1:9/v1")
    calls: list[Any] = [lambda: alone.invoke("hi"), lambda: streamed(alone), lambda: asyncio.run(astreamed(alone))]
    for call in calls:
        with pytest.raises(
            ProxyUnreachableError, match=r"nobody answers at http://127.0.0.1:9 \(ConnectError.*polykv-proxy"
        ) as error:
            call()
        assert isinstance(error.value, ModelConnectionError)
        assert isinstance(error.value, openai.APIConnectionError)


def test_a_request_that_is_held_streams_when_it_is_let_in(engine: Scripted, say: Any) -> None:
    """Chunks without choices while it waits are no content and no end."""
    assert say(model(engine, pool_id="hold")).text == "The keel lies below."


def test_f050_usage_in_a_graph_is_the_same_streamed_and_not(engine: Scripted) -> None:
    """In a LangGraph node with two stream modes: usage is there once, equal to the call without streaming, cached detail kept."""

    class State(TypedDict):
        messages: Annotated[list[BaseMessage], add_messages]

    bound = model(engine, pool_id="agents")
    graph = (
        StateGraph(State)
        .add_node("ask", lambda state: {"messages": [bound.invoke(state["messages"])]})
        .add_edge(START, "ask")
        .add_edge("ask", END)
        .compile()
    )
    ask = [HumanMessage(QUESTION)]
    plain = bound.invoke(ask).usage_metadata
    pieces: list[AIMessageChunk] = []
    final: dict[str, Any] = {}
    for mode, item in graph.stream({"messages": ask}, stream_mode=["messages", "values"]):
        if mode == "messages":
            pieces.append(item[0])
        else:
            final = item
    assert engine.bodies[-1]["stream"] is True
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata] == [plain]
    assert final["messages"][-1].usage_metadata == plain
    assert plain is not None
    assert plain["input_token_details"] == {"cache_read": N_CACHED}


def test_tokens_are_counted_by_the_server(engine: Scripted) -> None:
    """No file is fetched and nothing guessed; tools count."""
    bound = model(engine)
    assert bound.get_token_ids("one two three") == [3, 3, 5]
    plain = bound.get_num_tokens_from_messages([HumanMessage("one two")])
    assert bound.get_num_tokens_from_messages([HumanMessage("one two")], tools=[dive]) == plain + 10


def test_middleware_finds_the_size_of_the_context(engine: Scripted) -> None:
    """Fractions need the profile; reported usage needs provider and reply to agree on a name."""
    bound = model(engine, n_ctx=4096)
    assert bound.profile is not None
    assert bound.profile["max_input_tokens"] == 4096
    assert bound._get_ls_params()["ls_provider"] == bound.invoke(QUESTION).response_metadata["model_provider"]


def test_a_tool_turn_goes_back_as_it_came(engine: Scripted) -> None:
    """Call and result keep their id, name and arguments."""
    bound = model(engine).bind_tools([dive])
    call = bound.invoke("dive(3)")
    assert isinstance(call, AIMessage)
    bound.invoke([HumanMessage("dive(3)"), call, ToolMessage("at 3", tool_call_id=call.tool_calls[0]["id"])])
    _, turn, result = engine.bodies[-1]["messages"]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"depth": 3}
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"]
