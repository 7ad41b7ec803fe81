"""The two forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from polykv_proxy.core.histogram import Histogram
from polykv_proxy.observability.described import Described, Kind
from polykv_proxy.observability.engine_page import EnginePage, read_page
from polykv_proxy.observability.exposition import Form, form_of, parts, takes_gzip

GAUGE = Described("polykv_g", Kind.GAUGE, "A gauge.", ("pool",))
COUNTER = Described("opencoti_polykv:c", Kind.COUNTER, "A counter.")
HISTOGRAM = Described("vllm:h_seconds", Kind.HISTOGRAM, "A histogram.")
INFO = Described("vllm:cache_config", Kind.INFO, "Facts.", ("block_size",))


def families(n: int = 3) -> list:
    histogram = Histogram((0.0001, 0.5))
    histogram.add(0.25)
    return [
        GAUGE.each({str(i): i for i in range(n)}),
        COUNTER.one(7),
        HISTOGRAM.histogram(histogram),
        INFO.info(block_size="16"),
    ]


def rendered(form: Form, engine: bytes = b"", n: int = 3) -> str:
    return b"".join(parts(form, read_page(engine), families(n))).decode()


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Form.TEXT),
        ("*/*", Form.TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Form.TEXT),
        ("application/openmetrics-text", Form.OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3", Form.OPENMETRICS),
        ("text/plain;version=0.0.4,Application/OpenMetrics-Text; version=0.0.1", Form.OPENMETRICS),
        ("application/openmetrics-text;q=0,text/plain", Form.TEXT),
        ("application/openmetrics-textual", Form.TEXT),
        (";;,,;q=", Form.TEXT),
    ],
)
def test_the_form_is_the_one_asked_for(accept: str, form: Form) -> None:
    """OpenMetrics for those who list it, text for everyone else."""
    assert form_of(accept) is form


def test_compression_is_for_those_who_take_it() -> None:
    """Listed and not declined."""
    assert takes_gzip("deflate, GZIP;q=0.5")
    assert not takes_gzip("gzip;q=0, deflate")
    assert not takes_gzip("")


def test_names_stand_as_queries_want_them() -> None:
    """Colons stay, a counter ends in _total, an info in _info, a histogram has buckets, sum and count (exact text)."""
    assert rendered(Form.TEXT, n=1) == (
        "# HELP polykv_g A gauge.\n"
        "# TYPE polykv_g gauge\n"
        'polykv_g{pool="0"} 0.0\n'
        "# HELP opencoti_polykv:c_total A counter.\n"
        "# TYPE opencoti_polykv:c_total counter\n"
        "opencoti_polykv:c_total 7.0\n"
        "# HELP vllm:h_seconds A histogram.\n"
        "# TYPE vllm:h_seconds histogram\n"
        'vllm:h_seconds_bucket{le="0.0001"} 0.0\n'
        'vllm:h_seconds_bucket{le="0.5"} 1.0\n'
        'vllm:h_seconds_bucket{le="+Inf"} 1.0\n'
        "vllm:h_seconds_count 1.0\n"
        "vllm:h_seconds_sum 0.25\n"
        "# HELP vllm:cache_config_info Facts.\n"
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="16"} 1.0\n'
    )


ENGINE = b"""# HELP llamacpp:n_tokens_max Largest
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 3
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred NaN
llamacpp:odd_total 1
"""


def test_colons_stay_in_openmetrics() -> None:
    """The library makes underscores of them unless it is told not to."""
    strict = rendered(Form.OPENMETRICS, n=1)
    for line in ("# TYPE opencoti_polykv:c counter", "opencoti_polykv:c_total 7.0", 'vllm:h_seconds_bucket{le="0.5"} 1.0'):
        assert f"{line}\n" in strict


def test_both_forms_hold_the_same_families_for_strict_readers() -> None:
    """Text begins with the engine's own lines; OpenMetrics ends as it must; both parse and name each family once."""
    text, strict = rendered(Form.TEXT, ENGINE), rendered(Form.OPENMETRICS, ENGINE)
    assert text.startswith(ENGINE.decode())
    assert strict.endswith("# EOF\n")
    assert strict.count("# EOF") == 1
    names = [family.name for family in read_text(text)]
    assert len(set(names)) == len(names)
    samples = [
        [sample.name for family in read(page) for sample in family.samples]
        for read, page in ((read_text, text), (read_openmetrics, strict))
    ]
    assert samples[0] == samples[1]


def test_a_family_that_openmetrics_cannot_say_is_left_out_there_alone() -> None:
    """A summary without the fields of one stays in the text form."""
    odd = b"# TYPE llamacpp:s histogram\nllamacpp:s_bucket 1\nllamacpp:fine 2\n"
    assert "llamacpp:s_bucket" in rendered(Form.TEXT, odd)
    strict = rendered(Form.OPENMETRICS, odd)
    assert "llamacpp:s_bucket" not in strict
    assert "llamacpp:fine" in strict


def test_large_pages_come_in_parts() -> None:
    """No part is made of more than one large family, and together they are the whole."""
    made = list(parts(Form.TEXT, EnginePage(), [*families(500), *families(0)[1:2]]))
    assert len(made) > 2
    assert b"".join(made).count(b"polykv_g{") == 500


@given(st.text(max_size=30))
def test_no_label_value_breaks_a_page(value: str) -> None:
    """Quotes, backslashes, line ends and any other text survive as a label in both forms."""
    family = Described("polykv_x", Kind.GAUGE, "X.", ("model_name",)).one(1.0, value)
    for form, read in ((Form.TEXT, read_text), (Form.OPENMETRICS, read_openmetrics)):
        page = b"".join(parts(form, EnginePage(), [family])).decode()
        (found,) = read(page)
        assert found.samples[0].labels == {"model_name": value}
