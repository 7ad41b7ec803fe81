"""LangChain's standard tests, unit and integration, in full; the engine is scripted.

Law: nothing is overridden, and what the suites skip is listed with its reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from opencoti_langgraph import OpencotiChatModel
from tests.fakes.scripted_server import Scripted
from tests.langgraph.conftest import skipped

SKIPPED = {
    "test_serdes": "a model with connections is not written down",
    "test_pdf_inputs": "the engine reads no PDF",
    "test_pdf_tool_message": "the engine reads no PDF",
    "test_audio_inputs": "needs a model with ears",
    "test_image_inputs": "needs a model with eyes",
    "test_image_tool_message": "needs a model with eyes",
    "test_anthropic_inputs": "not a format of this API",
    "test_stream_time": "recorded cassettes measure a recording",
}
"""Standard tests that do not apply."""


class TestUnit(ChatModelUnitTests):
    """The unit suite."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return OpencotiChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "toy", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"OPENCOTI_API_KEY": "from-env", "OPENCOTI_BASE_URL": "http://127.0.0.1:9/v1"}
        return env, {"model": "toy"}, {"openai_api_key": "from-env", "openai_api_base": "http://127.0.0.1:9/v1"}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK's own, on streamed json_schema
@pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema")  # and it says so
class TestIntegration(ChatModelIntegrationTests):
    """The integration suite."""

    @pytest.fixture(autouse=True)
    def _served(self, engine: Scripted) -> None:
        self.engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return OpencotiChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "toy", "base_url": self.engine.url, "pool_id": "agents", "session_id": "s"}

    @property
    def model_override_value(self) -> str:
        return "another"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = OpencotiChatModel(**self.chat_model_params)
        if not stream:
            return model.invoke("What is shared?")
        chunks = iter(model.stream("What is shared?"))
        whole = next(chunks)
        for chunk in chunks:
            whole = whole + chunk  # type: ignore[assignment]
        return whole


def test_every_standard_test_runs_or_is_listed(request: pytest.FixtureRequest) -> None:
    """The suites are here whole, nothing is overridden, and what they skipped by themselves is in `SKIPPED` with a reason."""
    for ours, theirs in ((TestUnit, ChatModelUnitTests), (TestIntegration, ChatModelIntegrationTests)):
        assert not [name for name in vars(ours) if name.startswith("test_")]
        collected = {item.originalname for item in request.session.items if getattr(item, "cls", None) is ours}
        if not request.config.option.keyword and len(collected) > 1:  # unless only a part is being run
            assert collected == {name for name in dir(theirs) if name.startswith("test_")}
    assert skipped(request.config, TestUnit, TestIntegration) <= set(SKIPPED)
    assert all(SKIPPED.values())
