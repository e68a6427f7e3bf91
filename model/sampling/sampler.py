"""From a batch of logits to a batch of tokens.

Order of the stages, as vLLM has it (`model.sampling.params.Feature`): raw log-probabilities, bias, penalties, masks
(min-tokens, allowed ids, bad words, grammars), temperature, top-n-sigma and min-p, top-k, top-p, typical-p, draw. Every
row's result is a function of that row alone. A batch that is greedy throughout is one search for the largest.

Must not know: requests, blocks, the model, when an output ends.

Legend: S sampled rows of this step · V vocabulary · K candidates · R stable rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.model.cpu.ops import largest as largest_of
from octavo.model.sampling.filters import TOP_K_OFF, Filters, keep_typical, largest, masses, thresholds
from octavo.model.sampling.logits_processors import AllowedIds, BadWords, LogitBias, Penalties, TokenHistory
from octavo.model.sampling.logprobs import Logprobs, RawLogprobs
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.noise import log_exponential, row_keys
from octavo.model.sampling.params import MASKS, Feature, SamplingParams, SamplingRows, features_of

_FEW_CANDIDATES = 64
_MANY_CANDIDATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The result of sampling a batch.

    tokens_S: int64, on the logits' device.
    is_finite_S: bool, False if the row had NaN, +inf or nothing finite; its token (a valid id) is then meaningless.
    logprobs: None if no row asked for them.
    is_exhausted_S: bool, True if the row's masks forbid every token; its token is then meaningless too. None if no
      row has a mask.
    """

    tokens_S: torch.Tensor
    is_finite_S: torch.Tensor
    logprobs: Logprobs | None
    is_exhausted_S: torch.Tensor | None = None


class Sampler:
    """Holds the sampling parameters of R rows and draws their tokens.

    vocab_size: ids that may be sampled; logits beyond it are ignored. history: the rows' tokens, maintained by the
    caller.
    """

    def __init__(self, *, vocab_size: int, history: TokenHistory, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._rows = SamplingRows(max_rows=len(history.num_prompt_R), vocab_size=vocab_size)
        self._history = history
        self._penalties = Penalties(self._rows, history, self._device)
        self._bias = LogitBias(vocab_size=vocab_size, device=self._device)
        self._allowed = AllowedIds(max_rows=len(history.num_prompt_R), vocab_size=vocab_size, device=self._device)
        self._bad_words = BadWords(history, vocab_size=vocab_size, device=self._device)
        self._all_ids_V = torch.arange(vocab_size, dtype=torch.int32, device=self._device)

    def join(self, row: int, params: SamplingParams, output_ids_T: np.ndarray) -> None:
        """A row gets new parameters. output_ids_T: tokens that its output already has (after a preemption)."""
        self._rows.put(row, params)
        if Feature.PENALTY in features_of(params):
            self._penalties.put(row, output_ids_T)
        else:
            self._penalties.drop(row)
        self._bias.put(row, params.logit_bias)
        self._allowed.put(row, params.allowed_token_ids)
        self._bad_words.put(row, params.bad_words)

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Draw one token per row.

        logits_SV: float32, at least vocab_size wide; overwritten. rows_S: distinct rows. lengths_S: tokens in each
        row's history, before the drawn one. masks: for rows with a grammar.
        """
        logits_SV = logits_SV[:, : self.vocab_size]
        best_S, tokens_S = largest_of(logits_SV)
        is_finite_S = torch.isfinite(best_S)
        features_S = self._rows.features_R[rows_S]
        if not features_S.any() and masks is None:
            return Sampled(tokens_S=tokens_S, is_finite_S=is_finite_S, logprobs=None)
        if not bool(is_finite_S.all()):
            logits_SV[~is_finite_S] = 0.0
        raw = self._raw_logprobs(logits_SV, rows_S, features_S)
        is_changed = self._adjust(logits_SV, rows_S, lengths_S, features_S)
        is_exhausted_S = self._mask(logits_SV, rows_S, lengths_S, features_S, masks)
        if is_changed or is_exhausted_S is not None:
            tokens_S = logits_SV.argmax(dim=-1)
        self._draw_random(logits_SV, tokens_S, rows_S, self._output_lens(rows_S, lengths_S), features_S)
        self._count(tokens_S, rows_S, features_S)
        return Sampled(
            tokens_S=tokens_S,
            is_finite_S=is_finite_S,
            logprobs=None if raw is None else raw.choose(tokens_S),
            is_exhausted_S=is_exhausted_S,
        )

    def _output_lens(self, rows_S: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        return lengths_S - self._history.num_prompt_R[rows_S]

    def _raw_logprobs(self, logits_SV: torch.Tensor, rows_S: np.ndarray, features_S: np.ndarray) -> RawLogprobs | None:
        index_N = np.flatnonzero(features_S & Feature.LOGPROBS)
        if not len(index_N):
            return None
        return RawLogprobs(logits_SV, index_N, self._rows.num_logprobs_R[rows_S[index_N]])

    def _adjust(
        self, logits_SV: torch.Tensor, rows_S: np.ndarray, lengths_S: np.ndarray, features_S: np.ndarray
    ) -> bool:
        """Apply bias and penalties in place. Returns whether there were any."""
        biased, penal = _with(features_S, Feature.BIAS), _with(features_S, Feature.PENALTY)
        if len(biased):
            self._bias.apply(logits_SV, biased, rows_S[biased])
        if len(penal):
            self._penalties.apply(logits_SV, penal, rows_S[penal], lengths_S[penal])
        return len(biased) + len(penal) > 0

    def _mask(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        features_S: np.ndarray,
        masks: TokenMasks | None,
    ) -> torch.Tensor | None:
        """Set the logits of forbidden tokens to -inf. Returns the rows where nothing is left, whose logits become 0."""
        if not len(_with(features_S, MASKS)) and masks is None:
            return None
        is_short_S = self._output_lens(rows_S, lengths_S) < self._rows.columns["min_tokens"][rows_S]
        short = np.flatnonzero((features_S & Feature.MIN_TOKENS > 0) & is_short_S)
        allowed, banned = _with(features_S, Feature.ALLOWED), _with(features_S, Feature.BAD_WORDS)
        of_grammar = masks.index_N if masks is not None else short[:0]
        masked = np.unique(np.concatenate([short, allowed, banned, of_grammar]))
        if not len(masked):
            return None
        if masks is not None:
            masks.apply(logits_SV)
        if len(short):
            self._mask_stop_ids(logits_SV, short, rows_S)
        if len(allowed):
            self._allowed.apply(logits_SV, allowed, rows_S[allowed])
        if len(banned):
            self._bad_words.apply(logits_SV, banned, rows_S[banned], lengths_S[banned])
        is_exhausted_S = torch.zeros(len(rows_S), dtype=torch.bool, device=self._device)
        index = torch.from_numpy(masked).to(self._device)
        is_exhausted_S[index] = logits_SV[index].amax(dim=-1) == -torch.inf
        if bool(is_exhausted_S.any()):
            logits_SV[is_exhausted_S] = 0.0
        return is_exhausted_S

    def _count(self, tokens_S: torch.Tensor, rows_S: np.ndarray, features_S: np.ndarray) -> None:
        penal = _with(features_S, Feature.PENALTY)
        if len(penal):
            self._penalties.count(rows_S[penal], tokens_S[torch.from_numpy(penal).to(self._device)])

    def _mask_stop_ids(self, logits_SV: torch.Tensor, index_N: np.ndarray, rows_S: np.ndarray) -> None:
        ids_NW = self._rows.stop_ids_RW[rows_S[index_N]]
        which_M, columns_M = np.nonzero(ids_NW >= 0)
        place = (torch.from_numpy(index_N[which_M]), torch.from_numpy(ids_NW[which_M, columns_M]))
        minus_inf = torch.tensor(-torch.inf, device=self._device)
        logits_SV.index_put_((place[0].to(self._device), place[1].to(self._device)), minus_inf)

    def _draw_random(
        self,
        logits_SV: torch.Tensor,
        tokens_S: torch.Tensor,
        rows_S: np.ndarray,
        output_lens_S: np.ndarray,
        features_S: np.ndarray,
    ) -> None:
        """Overwrite the tokens of rows with a temperature above zero."""
        kind_S = np.where(features_S & Feature.TYPICAL, Feature.TYPICAL, features_S & (Feature.RANDOM | Feature.FILTER))
        draws = {
            Feature.RANDOM: self._draw_open,
            Feature.RANDOM | Feature.FILTER: self._draw_filtered,
            Feature.TYPICAL: self._draw_typical,
        }
        for kind, draw in draws.items():
            index_N = np.flatnonzero(kind_S == kind)
            if not len(index_N):
                continue
            rows_N = rows_S[index_N]
            index_t = torch.from_numpy(index_N).to(self._device)
            keys_N2 = self._to_device(row_keys(self._rows.seed_R[rows_N], output_lens_S[index_N]))
            columns = {name: self._to_device(column_R[rows_N]) for name, column_R in self._rows.columns.items()}
            logits_NV = logits_SV[index_t]
            x_NV = scaled(logits_NV, columns["temperature"])
            tokens_S[index_t] = draw(x_NV, keys_N2, Filters.of(logits_NV, columns))

    def _draw_open(self, x_NV: torch.Tensor, keys_N2: torch.Tensor, filters: Filters) -> torch.Tensor:
        """Rows without top-k and top-p: over the whole vocabulary, except what is below the floor."""
        return self._race_above(x_NV, keys_N2, filters.floor_S)

    def _draw_filtered(self, x_NV: torch.Tensor, keys_N2: torch.Tensor, filters: Filters) -> torch.Tensor:
        """Rows with top-k or top-p: over the most likely candidates, or over all if a row's cut is beyond them."""
        widest = int(filters.top_k_S.masked_fill(filters.top_k_S == TOP_K_OFF, 0).max())
        width = min(_FEW_CANDIDATES if widest < _FEW_CANDIDATES else _MANY_CANDIDATES, self.vocab_size)
        values_NK, ids_NK = largest(x_NV, width)
        mass_N = masses(x_NV, filters)
        least_N, is_right_N = thresholds(values_NK, mass_N, filters, vocab_size=self.vocab_size)
        score_NK = values_NK - log_exponential(keys_N2, ids_NK.to(torch.int32))
        score_NK = score_NK.masked_fill_(values_NK < least_N.unsqueeze(1), -torch.inf)
        tokens_N = ids_NK.gather(1, score_NK.argmax(dim=-1, keepdim=True)).squeeze(1)
        if not bool(is_right_N.all()):
            far = torch.nonzero(~is_right_N).squeeze(1)
            x_MV = x_NV[far]
            sorted_MV = x_MV.sort(dim=-1, descending=True).values
            least_M, _ = thresholds(sorted_MV, mass_N[far], filters.rows(far), vocab_size=self.vocab_size)
            tokens_N[far] = self._race_above(x_MV, keys_N2[far], least_M)
        return tokens_N

    def _draw_typical(self, x_NV: torch.Tensor, keys_N2: torch.Tensor, filters: Filters) -> torch.Tensor:
        """Rows with typical-p, over what the other filters keep; sorts the whole vocabulary."""
        sorted_NV = x_NV.sort(dim=-1, descending=True).values
        least_N, _ = thresholds(sorted_NV, masses(x_NV, filters), filters, vocab_size=self.vocab_size)
        x_NV = keep_typical(x_NV.masked_fill(x_NV < least_N.unsqueeze(1), -torch.inf), filters.typical_p_S)
        return self._race_above(x_NV, keys_N2, filters.floor_S)

    def _race_above(self, x_NV: torch.Tensor, keys_N2: torch.Tensor, least_N: torch.Tensor) -> torch.Tensor:
        """Draw from softmax(x) among the ids with x of at least least_N: the id with the largest x minus the logarithm
        of an exponential variate (Gumbel-max)."""
        score_NV = x_NV - log_exponential(keys_N2, self._all_ids_V)
        return score_NV.masked_fill_(x_NV < least_N.unsqueeze(1), -torch.inf).argmax(dim=-1)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def scaled(logits_NV: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """Logits divided by the temperature, with each row's maximum at 0: no temperature above zero overflows."""
    return (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / temperature_N.unsqueeze(1)


def _with(features_S: np.ndarray, wanted: Feature) -> np.ndarray:
    """int64: positions in the batch of the rows that have one of these features."""
    return np.flatnonzero(features_S & wanted)
