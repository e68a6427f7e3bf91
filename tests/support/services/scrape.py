"""A page of metrics, read as a scraper reads it."""

import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """What one scrape gave."""

    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series of this name that have these labels; 0 where there is none."""
        return sum(
            (
                sample.value
                for sample in self.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ),
            0.0,
        )


def _read(text: str) -> Iterable[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def scrape(port: int) -> Page:
    """Raises OSError where nobody answers on that port of the loopback interface."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        return Page(tuple(_read(answer.read().decode())))
