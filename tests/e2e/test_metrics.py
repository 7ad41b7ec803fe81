"""`/metrics` of the whole proxy on the real engine: what clients saw, what the engine says, and its page alone with `--off`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.fakes.product import Product, product
from tests.fakes.proxy_process import Served
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ARGS = ("-c", 2048, "-np", 2, "--temp", 0, "--seed", 1)
SYSTEM = "You are a terse assistant who knows a great deal about ships and harbours. " * 4
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def proxy(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product(engine_path, tiny_model("full"), tmp_path_factory.mktemp("metrics"), "--max-pools", "2", args=ARGS) as running:
        yield running


def samples(http: httpx.Client) -> dict[str, float]:
    """Values by name, of those with one sample, and by name and labels."""
    text = http.get("/metrics").raise_for_status().text
    list(read_openmetrics(http.get("/metrics", headers={"accept": "application/openmetrics-text"}).text))
    found: dict[str, float] = {}
    for family in read_text(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            named = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            found[f"{sample.name}{{{named}}}" if named else sample.name] = sample.value
    return found


def streamed(proxy: Product, body: dict[str, object]) -> dict[str, int]:
    """The usage that a streamed chat reports at its end."""
    usage: dict[str, int] = {}
    with proxy.http.stream("POST", CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage


def test_counters_agree_with_what_clients_saw(proxy: Product) -> None:
    """Prompt and generated tokens are the sums of all replies' usage; hits and savings those that the replies reported."""
    before = samples(proxy.http)
    pool = proxy.pool(messages=[{"role": "system", "content": SYSTEM}], name="m")
    usages, shared = [], 0
    for n, named in enumerate(("m", None, "m", "m")):
        system = SYSTEM if named else "You know nothing."
        turns = [{"role": "system", "content": system}, {"role": "user", "content": f"Ship {n}?"}]
        body: dict[str, object] = {"messages": turns, "max_tokens": 5 + n}
        if named is not None:
            body |= {"pool_id": named, "session_id": f"s{n}"}
        if n % 2:
            usages.append(streamed(proxy, body))
        else:
            reply = proxy.http.post(CHAT, json=body).raise_for_status()
            usages.append(reply.json()["usage"])
            shared += int(reply.headers["x-cached-prefix-tokens"])
    n_prompt, n_generated = (sum(usage[key] for usage in usages) for key in ("prompt_tokens", "completion_tokens"))

    def grown(name: str) -> float:
        return now[name] - before.get(name, 0)

    now = before

    def agrees() -> bool:
        nonlocal now
        now = samples(proxy.http)
        return grown("vllm:prompt_tokens_total") == n_prompt and grown("vllm:generation_tokens_total") == n_generated

    proxy.until(agrees)
    assert grown("vllm:prefix_cache_hits_total") == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert shared == 2 * pool["prefix_len"]
    assert grown("polykv_saved_prompt_tokens_total") == 3 * pool["prefix_len"]
    assert now[f"opencoti_polykv:queries_total{{pool={pool['pool_id']}}}"] == 3
    assert now[f"opencoti_polykv:prefix_cache_hits_total{{pool={pool['pool_id']}}}"] == 3
    assert grown("polykv_requests_total{outcome=complete,route=chat}") == 4
    assert grown("vllm:time_to_first_token_seconds_count") == 4
    assert grown("vllm:inter_token_latency_seconds_count") == n_generated - 4
    proxy.settled()
    proxy.until(lambda: (now := samples(proxy.http))["polykv_kv_owned_bytes"] == now["polykv_kv_used_bytes"] > 0)


def test_the_engine_s_own_page_is_there_as_it_is(proxy: Product) -> None:
    """Every name and type that the engine shows is on our page too, and none of ours is in the way."""
    proxy.settled()
    own = re.findall(r"^# TYPE .*$", proxy.engine.http.get("/metrics").raise_for_status().text, re.MULTILINE)
    assert len(own) > 10
    proxy.until(lambda: set(own) <= set(re.findall(r"^# TYPE .*$", proxy.http.get("/metrics").text, re.MULTILINE)))
    assert samples(proxy.http)["polykv_engine_state{state=ready}"] == 1


def test_the_cache_is_told_in_blocks_and_by_model(proxy: Product) -> None:
    """The contract's labels: the model as `/v1/models` calls it, and a cache as large as the engine's."""
    model = proxy.get("/v1/models")["data"][0]["id"]
    found = re.search(r"^vllm:cache_config_info\{(.*)\} 1", proxy.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    assert labels["model_name"] == model
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == proxy.get("/polykv/capacity")["cells_total"]


def test_off_leaves_the_engine_s_page_alone(engine_path: Path, tmp_path: Path) -> None:
    """With --off not a family is added."""
    with Served(engine_path, tiny_model("full"), tmp_path, "--off", args=["-c", "256", "-t", "1"]) as served:
        text = httpx.get(f"{served.url}/metrics", trust_env=False).raise_for_status().text
        assert {line.split(":")[0] for line in text.splitlines() if not line.startswith("#")} == {"llamacpp"}
        assert served.stop() == 0
