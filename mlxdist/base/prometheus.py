"""Metrics in Prometheus' text format. It needs prometheus_client, of the extra "lm"."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

__all__ = ["Registry"]


class Registry(CollectorRegistry):
    """A registry of one object. Its text leaves out when each counter began, which doubles the number of series.

    Args:
        namespace: the beginning of all names: "mlxdist_serve".
    """

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, namespace=self.namespace, registry=self)

    def gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, namespace=self.namespace, registry=self)

    def histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, about, namespace=self.namespace, registry=self, buckets=tuple(buckets))

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def text(self) -> str:
        return generate_latest(self).decode()
