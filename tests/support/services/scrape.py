"""Reads a page of metrics as a scraper does."""

import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """The result of one scrape."""

    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with this name and these labels; 0 if there are none."""
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
    """Scrape this port on loopback. Raises OSError if nothing answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        return Page(tuple(_read(answer.read().decode())))
