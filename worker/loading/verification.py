"""Log-probabilities that a loaded runner computes for known tokens, for `octavo verify` to compare with transformers.

The plans are like a service's: prompts whole, in chunks, among decodes; rows alone and together; pieces of text at
positions up to the end of the context. Such a piece follows a context that repeats one short text: the columns of its
block table point to the same few blocks, so that a context of any length costs as much to compute as the short text.

    positions    0 … 63 | 64 … start - 1            | start … end of the context
    blocks       a b c d | a b c d a b c d … a b c d | blocks of their own

Must not know: transformers, limits, how anything is printed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from octavo.model.verify.served import LONG_TEXT, NUM_TOP, ServedSequence, TokenScore
from octavo.wire.messages import SamplingParams
from octavo.worker.loading.warmup import WarmRunner
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, SlotLogprobs, StepPlan, StepResult

CHUNK_LENS = (1, 7, 16, 33)
SHARED_TOKENS = 64
PIECE_TOKENS = 40
PIECE_DECODES = 8


def blocks_wanted(prompts: Sequence[Sequence[int]], *, max_new_tokens: int, block_size: int) -> int:
    """Number of blocks that the pool needs for `serve_known_tokens`."""
    together = sum(-(-(len(prompt) + max_new_tokens) // block_size) + 1 for prompt in prompts)
    long = -(-(LONG_TEXT + SHARED_TOKENS + PIECE_TOKENS + PIECE_DECODES) // block_size) + 4
    return max(together, long)


def serve_known_tokens(
    runner: WarmRunner, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, max_batch_tokens: int
) -> list[ServedSequence]:
    """Run all checks; each sequence names its check. prompts: token ids, each shorter than half of the context."""
    feeder = _Feeder(runner, max_batch_tokens)
    longest = runner.config.max_model_len
    text = _text(prompts, min(LONG_TEXT, longest - 1))
    num_new = max(min(max_new_tokens, longest - max(map(len, prompts))), 1)
    served = [feeder.score("a long prompt", "whole", text, [len(text)])]
    served += [feeder.score("a long prompt", _chunks(), text, _cycle_lens(len(text)))]
    served += feeder.decode("decodes", "alone", prompts[:1], num_new)
    served += feeder.decode("decodes", f"{len(prompts)} together", prompts, num_new)
    served += feeder.decode_among_prompts("decodes", "among prompts", prompts, num_new)
    for end in _ends(longest):
        served.append(feeder.score_far("far positions", f"up to {end - 1}", text, end))
    return served


def _chunks() -> str:
    return f"chunks of {', '.join(map(str, CHUNK_LENS))}"


def _text(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """All prompts one after another, repeated up to num_tokens."""
    return [token for token, _ in zip(cycle(token for prompt in prompts for token in prompt), range(num_tokens))]


def _cycle_lens(num_tokens: int) -> list[int]:
    lens, lengths = [], cycle(CHUNK_LENS)
    while num_tokens:
        lens.append(min(next(lengths), num_tokens))
        num_tokens -= lens[-1]
    return lens


def _ends(longest: int) -> list[int]:
    """Where pieces end: at the last three of 128, 512, 2,048 and so on below the end of the context, and at that end.
    Leaves out ends that are too near the beginning; empty if the context is too short."""
    least = SHARED_TOKENS + 2 * (PIECE_TOKENS + PIECE_DECODES)
    ends = [1 << exponent for exponent in range(7, 40, 2) if least <= 1 << exponent < longest]
    return [*ends[-3:], longest] if longest >= least else []


@dataclass(slots=True)
class _Row:
    """A slot's request while it runs."""

    served: ServedSequence
    ids: list[int]

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class _Feeder:
    """Runs plans on an idle runner; allocates its blocks in a shuffled order."""

    runner: WarmRunner
    max_batch_tokens: int
    _step: int = 0
    _free: list[int] = field(default_factory=list)

    def score(self, check: str, mode: str, ids: list[int], chunk_lens: Sequence[int]) -> ServedSequence:
        """Score every position of one sequence."""
        self._reset()
        new = self._new_request(0, ids, prompt_scores=True)
        updates = self._deal(0, 0, len(ids))
        served = ServedSequence(check=check, mode=mode, token_ids=list(ids))
        for start, length in _spans(chunk_lens, self.max_batch_tokens):
            is_last = start + length == len(ids)
            chunk = Chunk(slot=Slot(0), start=start, num_tokens=length, is_last=is_last)
            result = self._run([new] if start == 0 else [], updates if start == 0 else [], [chunk])
            served.scores += _prompt_scores(result, chunk)
            if is_last:
                served.scores.append(_sampled_score(result, 0, len(ids) - 1))
        return served

    def decode(self, check: str, mode: str, prompts: Sequence[Sequence[int]], num_new: int) -> list[ServedSequence]:
        """Run all prompts, as many in a step as fit, then decode their greedy continuations as one batch."""
        self._reset()
        rows = {slot: self._row(check, mode, prompt) for slot, prompt in enumerate(prompts)}
        for group in _groups(prompts, self.max_batch_tokens):
            self._start(rows, group, num_new, [])
        for _ in range(num_new - 1):
            self._decode(rows, list(rows))
        return [row.served for row in rows.values()]

    def decode_among_prompts(
        self, check: str, mode: str, prompts: Sequence[Sequence[int]], num_new: int
    ) -> list[ServedSequence]:
        """Run one prompt per step, while those before it decode; each gets num_new tokens."""
        self._reset()
        rows = {slot: self._row(check, mode, prompt) for slot, prompt in enumerate(prompts)}
        for slot, row in rows.items():
            while row.length + len(rows) > self.max_batch_tokens and row.length > 1:
                row.ids.pop()  # shorten the prompt until a step has room for it beside the others
            self._start(rows, [slot], num_new, self._unfinished(rows, range(slot), num_new))
        while unfinished := self._unfinished(rows, rows, num_new):
            self._decode(rows, unfinished)
        return [row.served for row in rows.values()]

    def score_far(self, check: str, mode: str, text: list[int], end: int) -> ServedSequence:
        """Score a piece of text whose last token is at position end - 1, after a context that repeats one text."""
        self._reset()
        size = self.runner.config.block_size
        num_shared = -(-SHARED_TOKENS // size) * size
        start = (end - PIECE_TOKENS - PIECE_DECODES) // size * size
        num_shared = min(num_shared, start)
        num_scored = end - PIECE_DECODES - start
        shared, piece = _filled(text, num_shared), _filled(text[::-1], num_scored)
        ids = np.zeros(start + num_scored, np.int32)
        ids[:num_shared], ids[start:] = shared, piece
        updates = self._deal(0, 0, num_shared)
        blocks = [block for _, _, block in updates]
        columns = range(len(blocks), start // size)
        updates += [(0, column, blocks[column % len(blocks)]) for column in columns]
        updates += self._deal(0, start, end)
        counts = np.bincount(np.arange(start // size) % len(blocks), minlength=len(blocks))
        row = _Row(
            ServedSequence(
                check=check, mode=mode, token_ids=[*shared, *piece], num_shared=num_shared, start=start,
                repeats=tuple(np.repeat(counts, size)[:num_shared].tolist()),
            ),
            ids.tolist(),
        )  # fmt: skip
        first = True
        for begin, stop, is_scored in ((0, num_shared, False), (start, len(ids), True)):
            for offset, length in _spans([stop - begin], self.max_batch_tokens):
                at = begin + offset
                is_last = at + length == len(ids)
                chunk = Chunk(slot=Slot(0), start=at, num_tokens=length, is_last=is_last)
                new = [self._new_request(0, row.ids, prompt_scores=True)] if first else []
                result = self._run(new, updates if first else [], [chunk])
                first = False
                if is_scored:
                    row.served.scores += [_moved(score, start - num_shared) for score in _prompt_scores(result, chunk)]
                if is_last:
                    self._take(row, result, 0)
        for _ in range(PIECE_DECODES):
            self._decode({0: row}, [0])
        return row.served

    # ------------------------------------------------------------ steps

    def _start(self, rows: dict[int, _Row], slots: Sequence[int], num_new: int, decoding: list[int]) -> None:
        """Run the whole prompts of these slots in one step, among decodes. decoding: the slots that decode."""
        new_requests = [self._new_request(slot, rows[slot].ids, prompt_scores=False) for slot in slots]
        updates = [each for slot in slots for each in self._deal(slot, 0, rows[slot].length + num_new)]
        chunks = [Chunk(slot=Slot(slot), start=0, num_tokens=rows[slot].length, is_last=True) for slot in slots]
        result = self._run(new_requests, updates, chunks, {slot: rows[slot].length - 1 for slot in decoding})
        for index, slot in enumerate([*decoding, *slots]):
            self._take(rows[slot], result, index)

    def _decode(self, rows: dict[int, _Row], slots: list[int]) -> None:
        result = self._run([], [], [], {slot: rows[slot].length - 1 for slot in slots})
        for index, slot in enumerate(slots):
            self._take(rows[slot], result, index)

    def _take(self, row: _Row, result: StepResult, index: int) -> None:
        """Append the sampled token of row `index` of the result, with its scores."""
        score = _sampled_score(result, index, row.length - 1)
        row.served.scores.append(_moved(score, row.served.start - row.served.num_shared))
        row.ids.append(int(result.tokens_S[index]))
        row.served.token_ids.append(row.ids[-1])

    def _run(
        self,
        new_requests: Sequence[NewRequest],
        updates: Sequence[tuple[int, int, int]],
        chunks: Sequence[Chunk],
        decode: dict[int, int] | None = None,
    ) -> StepResult:
        decode = decode or {}
        plan = StepPlan(
            step=self._step,
            new_requests=tuple(new_requests),
            block_updates_U3=np.asarray(updates, np.int32).reshape(-1, 3),
            prefill=tuple(chunks),
            decode_slots_S=np.asarray(list(decode), np.int32),
            decode_positions_S=np.asarray(list(decode.values()), np.int32),
        )
        self._step += 1
        self.runner.launch(plan)
        return self.runner.collect()

    def _row(self, check: str, mode: str, prompt: Sequence[int]) -> _Row:
        return _Row(ServedSequence(check=check, mode=mode, token_ids=list(prompt)), list(prompt))

    def _unfinished(
        self, rows: dict[int, _Row], slots: Iterator[int] | range | dict[int, _Row], num_new: int
    ) -> list[int]:
        return [slot for slot in slots if rows[slot].served.num_sampled < num_new]

    def _new_request(self, slot: int, ids: Sequence[int], *, prompt_scores: bool) -> NewRequest:
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            num_logprobs=NUM_TOP,
            num_prompt_logprobs=NUM_TOP if prompt_scores else None,
        )
        array = np.asarray(ids, np.int32)
        return NewRequest(
            slot=Slot(slot), request_id="verify", token_ids_T=array, num_prompt_tokens=len(array), sampling=sampling
        )

    def _deal(self, slot: int, start: int, end: int) -> list[tuple[int, int, int]]:
        """Allocate blocks for positions start to end; returns (slot, column, block) of each."""
        size = self.runner.config.block_size
        return [(slot, column, self._free.pop()) for column in range(start // size, -(-end // size))]

    def _reset(self) -> None:
        self._free = np.random.default_rng(0).permutation(self.runner.config.num_blocks).tolist()


def _spans(chunk_lens: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each chunk, split if it is longer than `most`."""
    start = 0
    for length in chunk_lens:
        for offset in range(0, length, most):
            yield start + offset, min(most, length - offset)
        start += length


def _groups(prompts: Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Indices of prompts, in groups of at most `most` tokens in total."""
    group: list[int] = []
    for index, prompt in enumerate(prompts):
        if group and sum(len(prompts[each]) for each in group) + len(prompt) > most:
            yield group
            group = []
        group.append(index)
    yield group


def _filled(text: Sequence[int], num_tokens: int) -> list[int]:
    return [token for token, _ in zip(cycle(text), range(num_tokens))]


def _prompt_scores(result: StepResult, chunk: Chunk) -> list[TokenScore]:
    """The prompt's scores of a step with just this chunk."""
    return [_score(each, chunk.start + index) for index, each in enumerate(result.prompt_logprobs.get(0, ()))]


def _sampled_score(result: StepResult, index: int, after: int) -> TokenScore:
    score = _score(result.logprobs[index], after)
    token, is_finite = int(result.tokens_S[index]), bool(result.is_finite_S[index])
    return TokenScore(after=after, token_ids=score.token_ids, logprobs=score.logprobs, sampled=token,
                      chosen_logprob=result.logprobs[index].logprob if is_finite else float("nan"))  # fmt: skip


def _score(logprobs: SlotLogprobs, after: int) -> TokenScore:
    return TokenScore(after=after, token_ids=logprobs.top_ids, logprobs=logprobs.top_logprobs,
                      chosen_logprob=logprobs.logprob)  # fmt: skip


def _moved(score: TokenScore, by: int) -> TokenScore:
    """The score with `by` subtracted from its position: turns a position into an index of the sequence's tokens."""
    return TokenScore(after=score.after - by, token_ids=score.token_ids, logprobs=score.logprobs,
                      chosen_logprob=score.chosen_logprob, sampled=score.sampled)  # fmt: skip
