"""What a metric is: its name, its kind, its labels and what it says.

Law: a name stands once; a family has exactly the labels it was described with. `docs/metrics.md` and `deploy/` are held to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from polykv_proxy.core.histogram import Histogram

Values: TypeAlias = Mapping[str, float]


class Kind(Enum):
    """Kinds of families; a counter's samples end in `_total`, an info's in `_info`."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Described:
    """One family. `name` is without the suffix of its kind; `labels` in the order in which values are given."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name in queries; that of a histogram is followed by `_bucket`, `_sum`, `_count`."""
        return self.name + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")

    def one(self, value: float, *labels: str) -> Metric:
        """The family with one sample."""
        return self.many({labels: value})

    def many(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """The family with a sample for each set of label values."""
        make = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = make(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def each(self, values: Values) -> Metric:
        """The family with a sample for each value of its only label."""
        return self.many({(label,): value for label, value in values.items()})

    def histogram(self, values: Histogram, *labels: str) -> Metric:
        """The family of a histogram."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        buckets = [("+Inf" if bound == inf else str(bound), count) for bound, count in values.buckets()]
        family.add_metric(labels, buckets, values.sum)
        return family

    def info(self, **values: str) -> Metric:
        """The family whose facts are its labels."""
        assert tuple(values) == self.labels
        return InfoMetricFamily(self.name, self.help, value=values)
