"""Our part of the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from polykv_proxy.core.admission.decisions import ENDS
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Mode, OnSaturation, Policy
from polykv_proxy.core.histogram import Histogram
from polykv_proxy.core.tally import Ending, PoolTally, RelayTally, Route
from polykv_proxy.core.turn_tally import NotShared, TurnTally
from polykv_proxy.observability import catalog
from polykv_proxy.observability.collector import Counts, ProxyCollector, Sources
from polykv_proxy.observability.contract import ServerFacts, Tokens
from polykv_proxy.observability.described import Kind
from polykv_proxy.observability.engine_page import EnginePage
from polykv_proxy.observability.engine_source import EngineSource
from polykv_proxy.observability.exposition import Form, parts
from polykv_proxy.runtime.rows import StateView
from tests.fakes.state_view import EMPTY, FULL, pool, session

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


SERVER = ServerFacts(1, 2, Tokens(50, 30, 20), 0.25, 100)


class Page:
    """A collector whose sources can be changed."""

    def __init__(self, view: StateView = FULL, server: ServerFacts = SERVER) -> None:
        self.view = view
        self.turns = TurnTally()
        self.source = EngineSource(lambda: None, lambda: 1, lambda: 0.0)  # type: ignore[arg-type, return-value]
        self.source._page, self.source._of = EnginePage(), 1
        self.relay = RelayTally()
        self.gate = Gate(Limits(), lambda _: None)
        self.gate.set_policy(1, Policy(15.0, Mode.ENFORCED))
        self.collector = ProxyCollector(
            Sources(
                view=lambda: self.view,
                server=lambda _: server,
                used_bytes=lambda view: view.whole.cells_used * 12.5,
                counts=Counts,
                engine_state=lambda: "ready",
                model_name=lambda: "m.gguf",
                relay=self.relay,
                turns=self.turns,
                pools=PoolTally(),
                gate=self.gate,
                engine_page=self.source,
                loop_lag=Histogram((0.1,)),
                version="0.1.0",
            )
        )

    def text(self, form: Form = Form.TEXT) -> str:
        return b"".join(parts(form, EnginePage(), self.collector.collect())).decode()

    def samples(self) -> dict[str, float]:
        """Values by name and labels, as they stand on the page."""
        lines = (line for line in self.text().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_full_page_has_every_metric_of_the_catalogue_and_no_other() -> None:
    """Names and kinds on the page are exactly those described, in both forms, for strict readers."""
    described = {(one.shown, "gauge" if one.kind is Kind.INFO else one.kind.value) for one in catalog.ALL}
    page = Page()
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page.text(), re.MULTILINE)
    assert len(found) == len(set(found)) == len(described)
    assert set(found) == described
    assert {family.name for family in read_openmetrics(page.text(Form.OPENMETRICS))} == {one.name for one in catalog.ALL}


def test_labels_are_those_described() -> None:
    """Each sample has exactly the labels of its family, besides `le`."""
    labels = {one.name: set(one.labels) for one in catalog.ALL}
    for family in read_openmetrics(Page().text(Form.OPENMETRICS)):
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels[family.name]


def test_what_is_not_known_is_left_out() -> None:
    """Without an engine that speaks there is no guess at its KV, its speed or its requests; the page stays sound."""
    page = Page(EMPTY, ServerFacts(0, 0))
    page.source._of = None
    text = page.text()
    for name in (
        "_perc",
        "cache_config",
        "vllm:prompt_tokens",
        "polykv_kv_cells",
        "polykv_kv_bytes",
        "polykv_mean_active_tps",
        "polykv_engine_page_age_seconds",
        "NaN",
    ):
        assert name not in text
    list(read_text(text))
    list(read_openmetrics(page.text(Form.OPENMETRICS)))


def test_the_books_stand_beside_the_engine_s_own_figure() -> None:
    """Σ by owner is the sum over kinds; the engine's count is a metric of its own."""
    samples = Page().samples()
    assert samples["polykv_kv_owned_bytes"] == 125
    assert samples["polykv_kv_owned_bytes"] == sum(
        samples[f'polykv_kv_bytes{{kind="{kind}"}}'] for kind in ("pool", "session", "other")
    )
    assert samples["polykv_kv_used_bytes"] == 125


def test_the_contract_of_a_model_server_is_kept() -> None:
    """Gauges and counters under vLLM's names, usage as a ratio, the cache in blocks, all with the model's name."""
    samples = Page().samples()
    label = '{model_name="m.gguf"}'
    want = {"num_requests_running": 1, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25, "gpu_cache_usage_perc": 0.25,
            "prefix_cache_queries_total": 50, "prefix_cache_hits_total": 30, "gpu_prefix_cache_queries_total": 50,
            "gpu_prefix_cache_hits_total": 30, "prompt_tokens_total": 50, "generation_tokens_total": 20}  # fmt: skip
    assert {name: samples[f"vllm:{name}{label}"] for name in want} == want
    assert samples['vllm:cache_config_info{block_size="16",model_name="m.gguf",num_gpu_blocks="6"}'] == 1


def test_requests_without_a_pool_are_under_none() -> None:
    """Speed, KV, sessions and queries of nobody's pool have a label too."""
    page = Page()
    page.turns.not_shared[NotShared.NO_POOL] = 9
    samples = page.samples()
    assert samples['opencoti_polykv:gen_throughput_tps{pool="none"}'] == 2
    assert samples['opencoti_polykv:pool_kv_bytes{pool="none"}'] == 5
    assert samples['opencoti_polykv:pool_sessions{pool="none"}'] == 1
    assert samples['opencoti_polykv:queries_total{pool="none"}'] == 9
    assert samples['opencoti_polykv:queries_total{pool="1"}'] == 4
    assert samples['opencoti_polykv:prefix_cache_hits_total{pool="1"}'] == 3
    assert samples['polykv_pool_saved_prompt_tokens_total{pool="1"}'] == 400
    assert samples['polykv_pool_saved_seconds_total{pool="1"}'] == 4


def test_a_thousand_pools_are_a_hundred_series(tmp_path: Path) -> None:
    """Whatever is made, the page stays under 200 KB and a few hundred series a family; when all is gone, nothing is left (F068)."""
    page = Page(replace(FULL, pools=()))
    empty = len(page.samples())
    page.view = replace(FULL, pools=tuple(pool(n) for n in range(1, 1001)), sessions=tuple(session(n, 1.0) for n in range(1, 5001)))
    samples = page.samples()
    assert samples['opencoti_polykv:queries_total{pool="other"}'] == 900 * 4
    assert sum(name.startswith("opencoti_polykv:queries_total") for name in samples) == 102
    assert len(page.text()) < 200_000
    page.view = replace(FULL, pools=())
    left = page.samples()
    assert left['opencoti_polykv:queries_total{pool="other"}'] == 900 * 4
    assert len(left) - empty == 4


def test_every_outcome_is_there_before_it_occurs() -> None:
    """A counter that begins at zero can be watched from the start."""
    page = Page()
    page.relay.ended[Route.CHAT, Ending.COMPLETE] += 2
    samples = page.samples()
    assert samples['polykv_requests_total{outcome="complete",route="chat"}'] == 2
    assert sum(name.startswith("polykv_requests_total") for name in samples) == len(Route) * len(Ending)
    assert samples['polykv_engine_state{state="ready"}'] == 1
    assert samples['polykv_engine_state{state="failed"}'] == 0


def test_what_the_gate_decides_is_counted_by_arm_and_outcome() -> None:
    """Each pair that can occur is there at zero; who waited is in the histogram once; a policy shows its floor under its pool."""
    page = Page()
    load = Load(mean_active_tps=20.0, n_active=1, runs={1: Run(500)})
    page.gate.set_policy(1, replace(page.gate.outlook.policies.own(1), on_saturation=OnSaturation.QUEUE))  # type: ignore[type-var]
    page.gate.set_policy(DEFAULT_SCOPE, Policy(4.0))
    page.gate.ask(Ask(1, 1, "a", overcommit=True), load, 0.0)
    page.gate.ask(Ask(2, 1, "b"), load, 1.0)
    waiting = page.samples()
    assert waiting['polykv_admission_decisions_total{arm="overcommit",outcome="admitted"}'] == 1
    assert waiting['polykv_admission_decisions_total{arm="floor",outcome="timed_out"}'] == 0
    assert waiting['polykv_admission_holds_total{arm="floor"}'] == 1
    assert (waiting["polykv_admission_queued"], waiting["polykv_admission_running"]) == (1, 1)
    assert waiting['polykv_admission_floor_tps{mode="enforced",pool="1"}'] == 15
    assert waiting['polykv_admission_floor_tps{mode="advisory",pool="none"}'] == 4
    assert waiting["polykv_admission_wait_seconds_count"] == 0
    page.gate.closed(2, 3.0)
    page.gate.ask(Ask(3, None, "c"), load, 3.0)
    gone = page.samples()
    assert gone['polykv_admission_decisions_total{arm="floor",outcome="cancelled"}'] == 1
    assert (gone["polykv_admission_wait_seconds_count"], gone["polykv_admission_wait_seconds_sum"]) == (1, 2)
    assert gone['polykv_admission_settling{pool="none"}'] == 1
    assert sum(name.startswith("polykv_admission_decisions") for name in gone) == len(ENDS)


def test_a_policy_of_a_pool_that_the_page_does_not_have_is_left_out() -> None:
    """No series jumps from one label to another when its pool appears; beyond the first hundred the highest floor stands."""
    page = Page(replace(FULL, pools=()))
    assert not [name for name in page.samples() if name.startswith("polykv_admission_floor_tps")]
    page.view = replace(FULL, pools=tuple(pool(n) for n in range(1, 103)))
    page.gate.set_policy(101, Policy(6.0, Mode.ENFORCED))
    page.gate.set_policy(102, Policy(9.0, Mode.ENFORCED))
    samples = page.samples()
    assert samples['polykv_admission_floor_tps{mode="enforced",pool="other"}'] == 9
    assert samples['polykv_admission_settling{pool="other"}'] == 0


def test_the_docs_list_every_metric() -> None:
    """The table of docs/metrics.md is the one that the code makes."""
    assert catalog.reference() in DOCS.read_text("utf-8"), f"replace the table in {DOCS.name} by:\n{catalog.reference()}"
