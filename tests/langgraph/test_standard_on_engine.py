"""LangChain's standard integration tests on the real engine through the real proxy.

Law: nothing is overridden, and nothing is expected to fail. The model is a puppet (`tests/models/puppet.py`): what it says is known
beforehand; that the engine's grammars take it, that calls are found in it and come back whole is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from opencoti_langgraph import OpencotiChatModel
from tests.fakes.proxy_process import Served
from tests.langgraph.conftest import skipped
from tests.langgraph.real import served_puppet
from tests.langgraph.test_standard import SKIPPED

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> Iterator[Served]:
    with served_puppet(engine_path, tmp_path_factory.mktemp("standard")) as served:
        yield served


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK's own, on streamed json_schema
@pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema")  # and it says so
class TestOnEngine(ChatModelIntegrationTests):
    """The integration suite."""

    @pytest.fixture(autouse=True)
    def _served(self, served: Served) -> None:
        self.url = served.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return OpencotiChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "puppet", "base_url": f"{self.url}/v1", "session_id": "standard", "max_tokens": 64}

    @property
    def supports_model_override(self) -> bool:
        return False  # the engine has one model, and says which

    @property
    def supports_json_mode(self) -> bool:
        return True


def test_nothing_is_skipped_without_a_reason(request: pytest.FixtureRequest) -> None:
    """What is skipped is listed, and besides that only what asks for another model."""
    unlisted = skipped(request.config, TestOnEngine) - set(SKIPPED)
    assert all(name.endswith("_with_model_override") for name in unlisted)
