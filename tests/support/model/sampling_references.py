"""The same rows in the CPU sampler and in the device's, token by token. Importable only if triton is installed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.model.gpu.sampling_columns import Stage
from octavo.model.gpu.sampling_state import DeviceMasks, SampledBatch, SamplingState
from octavo.model.kernels.sampling.filter import EXHAUSTED
from octavo.model.kernels.sampling.logprobs import MAX_TOP
from octavo.model.kernels.sampling.sample import SampleParts, sample_and_advance
from octavo.model.sampling.logits_processors import TokenHistory
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.sampler import Sampled, Sampler
from octavo.wire.messages import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """For every row: its token, whether its logits were finite, whether masks left no token. Log-probabilities by row:
    of the chosen token, top ids, and the log-probabilities of those."""

    tokens: list[int]
    is_finite: list[bool]
    is_exhausted: list[bool]
    logprobs: dict[int, tuple[float, list[int], list[float]]]


class SamplingPair:
    """num_ids: tokens of each row at the start, of which the first five are its prompt; None: drawn at random."""

    def __init__(self, sampling: list[dict[str, Any]], *, seed: int, vocab: int, num_ids: int | None = None) -> None:
        rng, R = np.random.default_rng(seed), len(sampling)
        self.vocab, self.num_rows = vocab, R
        self.history = TokenHistory(max_rows=R, max_len=64)
        self.slow = Sampler(vocab_size=vocab, history=self.history)
        self.state = SamplingState(num_rows=R + 1, max_batch=R + 2, vocab_size=vocab, device=DEVICE)
        self.lengths = rng.integers(6, 30, R) if num_ids is None else np.full(R, num_ids)
        self.seeds = rng.integers(0, 2**63, R)
        self.params = [
            SamplingParams(**({"seed": int(self.seeds[row])} | params)) for row, params in enumerate(sampling)
        ]
        self.num_prompt = np.minimum(self.lengths, 5)
        for row in range(R):
            ids_T = rng.integers(0, vocab, self.lengths[row]).astype(np.int32)
            ids_T[-1] = ids_T[-2]
            self.put(row, ids_T, int(self.num_prompt[row]))

    def put(self, row: int, ids_T: np.ndarray, num_prompt: int) -> None:
        """Give the row these tokens."""
        self.lengths[row], self.num_prompt[row] = len(ids_T), num_prompt
        self.history.put(row, ids_T, num_prompt)
        self.slow.join(row, self.params[row], ids_T[num_prompt:])
        self.state.put(row, self.params[row], ids_T, num_prompt)

    def seen(self) -> torch.Tensor:
        """bool [R, vocab]: tokens that occur in each row."""
        seen = torch.zeros(self.num_rows, self.vocab, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            seen[row, torch.from_numpy(self.history.tokens_RT[row, :length].astype(np.int64))] = True
        return seen

    def choose(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> tuple[Outcome, Outcome]:
        """Outcomes of the CPU sampler and of the device's; both continue with the former's tokens. logits: [R,
        width]."""
        rows = np.arange(self.num_rows)
        wanted = self._told(self.slow.sample(logits.float().clone(), rows, self.lengths, masks))
        got = self._on_device(logits, masks)
        self.history.tokens_RT[rows, self.lengths] = wanted.tokens
        self.lengths = self.lengths + 1
        return wanted, got

    def _told(self, sampled: Sampled) -> Outcome:
        told = sampled.logprobs
        exhausted = [False] * self.num_rows if sampled.is_exhausted_S is None else sampled.is_exhausted_S.tolist()
        rows = [] if told is None else list(zip(told.index_N, told.count_N, told.chosen_N, strict=True))
        return Outcome(
            tokens=sampled.tokens_S.tolist(),
            is_finite=sampled.is_finite_S.tolist(),
            is_exhausted=exhausted,
            logprobs={
                int(row): (float(chosen), told.top_ids_NK[i, :count].tolist(), told.top_NK[i, :count].tolist())  # type: ignore[union-attr]
                for i, (row, count, chosen) in enumerate(rows)
            },
        )

    def _on_device(self, logits: torch.Tensor, masks: TokenMasks | None) -> Outcome:
        """The device's outcome, with rows in another order and two rows of padding whose logits are NaN."""
        R, state = self.num_rows, self.state.state
        order = torch.randperm(R, generator=torch.Generator().manual_seed(R))
        padded = torch.cat([logits[order], torch.full((2, logits.shape[1]), torch.nan, dtype=logits.dtype)])
        self._place()
        batch = SampledBatch(
            logits_BV=padded.to(DEVICE),
            rows_B=torch.cat([order, torch.tensor([R, R])]).to(torch.int32).to(DEVICE),
            token_B=torch.full((R + 2,), -7, dtype=torch.int32, device=DEVICE),
            is_finite_B=torch.full((R + 2,), 9, dtype=torch.int8, device=DEVICE),
        )
        sample_and_advance(
            batch.logits_BV, batch.rows_B, state.temperature_R, state.seed_R, state.num_prompt_R, state.last_token_R,
            state.position_R, batch.token_B, batch.is_finite_B, SampleParts(R + 2, self.vocab, DEVICE),
        )  # fmt: skip
        place = torch.argsort(order)
        self.state.run(~Stage.NONE, batch, None if masks is None else self._sent(masks, place))
        assert state.last_token_R[:R].tolist() == batch.token_B[place.to(DEVICE)].tolist()
        assert (int(state.last_token_R[R]), int(state.position_R[R])) == (-5, 0)
        flags = batch.is_finite_B[place.to(DEVICE)].tolist()
        return Outcome(
            tokens=batch.token_B[place.to(DEVICE)].tolist(),
            is_finite=[bool(flag & 1) for flag in flags],
            is_exhausted=[bool(flag & EXHAUSTED) for flag in flags],
            logprobs=self._answers(place),
        )

    def _place(self) -> None:
        """Place each row before its newest token, as between two steps."""
        state = self.state.state
        for column, values in (
            (state.temperature_R, [params.temperature for params in self.params] + [0.0]),
            (state.seed_R, [np.uint64(params.seed).astype(np.int64).item() for params in self.params] + [0]),
            (state.position_R, [*(self.lengths - 1).tolist(), 0]),
            (state.num_prompt_R, [*self.num_prompt.tolist(), 0]),
        ):
            column.copy_(torch.tensor(values, dtype=column.dtype))
        state.last_token_R.fill_(-5)

    def _sent(self, masks: TokenMasks, place: torch.Tensor) -> DeviceMasks:
        column_N = place[torch.from_numpy(masks.index_N)].to(torch.int32)
        return DeviceMasks(column_N=column_N.to(DEVICE), mask_NW=torch.from_numpy(masks.bits_NW).to(DEVICE))

    def _answers(self, place: torch.Tensor) -> dict[int, tuple[float, list[int], list[float]]]:
        words = self.state.logprobs.answer_BX.cpu()
        values, found = words.view(torch.float32), {}
        for row, params in enumerate(self.params):
            if (count := params.num_logprobs) is not None:
                b = int(place[row])
                top = values[b, 1 + MAX_TOP :][:count].tolist()
                found[row] = (float(values[b, 0]), words[b, 1:][:count].tolist(), top)
        return found
