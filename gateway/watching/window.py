"""What was counted in the last seconds: differences of counters that only grow.

Pure: counters and times in, differences out. Every gateway keeps its own window all the time, since a sample a second
costs next to nothing; so the first snapshot of a watch has rates.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.gateway.observability.meters import GatewayMeters, ModelMeters
from octavo.gateway.workers.views import WorkerView

WINDOW_S = 10.0
LEAST_WINDOW_S = 1.0  # below, a rate would be a guess
_SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCounts:
    """One model's counters. The last three are histograms, by bucket."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_finished: int = 0
    time_to_first_token: tuple[int, ...] = ()
    inter_token: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()

    @classmethod
    def of(cls, meters: ModelMeters) -> "ModelCounts":
        """The counters as they are now."""
        return cls(
            prompt_tokens=meters.prompt_tokens,
            generation_tokens=meters.generation_tokens,
            num_finished=meters.finished.total(),
            time_to_first_token=tuple(meters.time_to_first_token.counts),
            inter_token=tuple(meters.inter_token.counts),
            queue=tuple(meters.queue.counts),
        )

    def since(self, former: "ModelCounts") -> "ModelCounts":
        """The difference to an earlier reading."""
        return ModelCounts(
            prompt_tokens=self.prompt_tokens - former.prompt_tokens,
            generation_tokens=self.generation_tokens - former.generation_tokens,
            num_finished=self.num_finished - former.num_finished,
            time_to_first_token=_since(self.time_to_first_token, former.time_to_first_token),
            inter_token=_since(self.inter_token, former.inter_token),
            queue=_since(self.queue, former.queue),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """One worker epoch's counters."""

    num_steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """All counters at one moment, or differences between two. tenants: prompt and output tokens. workers: by id and
    epoch; in differences, those present at both moments."""

    at_s: float
    models: Mapping[str, ModelCounts] = field(default_factory=dict)
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    workers: Mapping[tuple[str, str], WorkerCounts] = field(default_factory=dict)


class LoadWindow:
    """One per gateway. Call `sample` about once a second; times are monotonic seconds from the caller."""

    def __init__(self, meters: GatewayMeters, *, now_s: float) -> None:
        self._meters = meters
        self._samples: deque[Counts] = deque([Counts(at_s=now_s)])

    def sample(self, workers: Iterable[WorkerView], now_s: float) -> None:
        """Record the counters as they are now."""
        self._samples.append(self._counts(workers, now_s))
        while len(self._samples) > 1 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()

    def read(self, workers: Iterable[WorkerView], now_s: float) -> tuple[float, Counts]:
        """(length of the window in seconds, at least LEAST_WINDOW_S; what was counted in it)."""
        now, then = self._counts(workers, now_s), self._samples[0]
        for sample in self._samples:
            if sample.at_s > now_s - WINDOW_S:
                break
            then = sample
        nothing = ModelCounts()
        models = {name: each.since(then.models.get(name, nothing)) for name, each in now.models.items()}
        tenants = {
            name: (prompt - before[0], generation - before[1])
            for name, (prompt, generation) in now.tenants.items()
            for before in [then.tenants.get(name, (0, 0))]
        }
        workers_since = {key: _worker_since(each, self._first_of(key, then)) for key, each in now.workers.items()}
        counts = Counts(at_s=now_s, models=models, tenants=tenants, workers=workers_since)
        return max(LEAST_WINDOW_S, now_s - then.at_s), counts

    def _first_of(self, key: tuple[str, str], then: Counts) -> WorkerCounts | None:
        """The worker's counters at the beginning of the window, or when it was first seen."""
        if key in then.workers:
            return then.workers[key]
        return next((each.workers[key] for each in self._samples if key in each.workers), None)

    def _counts(self, workers: Iterable[WorkerView], now_s: float) -> Counts:
        return Counts(
            at_s=now_s,
            models={name: ModelCounts.of(meters) for name, meters in self._meters.models.items()},
            tenants={name: (each.prompt_tokens, each.generation_tokens) for name, each in self._meters.tenants.items()},
            workers={
                (each.worker_id, each.epoch): WorkerCounts(
                    num_steps=each.num_steps,
                    prefill_tokens=each.num_prefill_tokens,
                    generated_tokens=each.num_generated_tokens,
                )
                for each in workers
            },
        )


def percentiles(bounds: Sequence[float], counts: Sequence[int]) -> tuple[float, float, float] | None:
    """Median, 95th and 99th percentile by linear interpolation within buckets; None without values. bounds: upper
    bounds of all buckets but the last, whose values count as the last bound."""
    total = sum(counts)
    if not total or len(counts) != len(bounds) + 1:
        return None
    median, most, nearly_all = (_quantile(bounds, counts, share * total) for share in _SHARES)
    return median, most, nearly_all


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """The sum of histograms with the same buckets. Histograms of other lengths, from gateways of other versions, are
    skipped."""
    rows = [each for each in counts if each]
    return [sum(column) for column in zip(*(each for each in rows if len(each) == len(rows[0])), strict=True)]


def _quantile(bounds: Sequence[float], counts: Sequence[int], rank: float) -> float:
    below = 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - below) / count
        below += count
    return bounds[-1]


def _since(counts: tuple[int, ...], former: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(counts, former, strict=True)) if former else counts


def _worker_since(now: WorkerCounts, then: WorkerCounts | None) -> WorkerCounts:
    if then is None:
        return WorkerCounts()
    return WorkerCounts(
        num_steps=max(0, now.num_steps - then.num_steps),
        prefill_tokens=max(0, now.prefill_tokens - then.prefill_tokens),
        generated_tokens=max(0, now.generated_tokens - then.generated_tokens),
    )
