"""The running requests as arrays, one row per slot, so that a steady decode step costs no Python per request.

    tokens of a row    |--- computed, verified ---|--- in flight ---|--- known, not scheduled ---|--- not yet ---|
                       0                     num_computed     num_scheduled                  num_known        limit

With a step in flight, ``num_scheduled`` may reach ``num_known``: the token at that position is still being sampled. A
token is *verified* once another has been sampled after it from finite logits. Knows no blocks, no clock, no queue.

Slots that index these arrays are intp: numpy converts any other type at each access, which costs more than the access.

Shapes: S slots · L tokens of the longest request · K stop tokens of one request · N rows of a call, or rows of a step
for which a token is sampled · A all rows of a step, of which the first N are sampled
"""

from dataclasses import dataclass

import numpy as np

from octavo.wire.messages import SamplingParams
from octavo.worker.scheduler.plan import Slot, StepPlan
from octavo.worker.scheduler.request import Request, tick

NO_TOKEN = -1  # pads rows of stop tokens; no token has this id


class SlotState:
    """Numbers of each slot. All are int32 unless stated otherwise.

    token_ids_SL: prompt and output. limit_S: greatest number of tokens, prompt and output together. is_decoding_S,
    has_grammar_S: bool. first_stop_S: the first position at which a stop token counts. num_stops_S, stops_KS: the
    stop tokens of each slot, padded with NO_TOKEN.
    generation_S: int64, changes whenever a request takes or leaves the slot, so that late results are not applied to
    the slot's next holder. handle_S: int64. last_token_s_S: float64, NaN before the first token. token_ticks_SL:
    uint32, when each token came, in ticks (worker/scheduler/request.py); undefined for the prompt.
    """

    def __init__(self, *, num_slots: int, max_total_tokens: int) -> None:
        self.token_ids_SL = np.empty((num_slots, max_total_tokens), np.int32)
        self.token_ticks_SL = np.empty((num_slots, max_total_tokens), np.uint32)
        self.num_known_S = np.zeros(num_slots, np.int32)
        self.num_scheduled_S = np.zeros(num_slots, np.int32)
        self.num_computed_S = np.zeros(num_slots, np.int32)
        self.limit_S = np.zeros(num_slots, np.int32)
        self.first_stop_S = np.zeros(num_slots, np.int32)
        self.num_stops_S = np.zeros(num_slots, np.int32)
        self.stops_KS = np.full((0, num_slots), NO_TOKEN, np.int32)
        self.is_decoding_S = np.zeros(num_slots, np.bool_)
        self.has_grammar_S = np.zeros(num_slots, np.bool_)
        self.generation_S = np.zeros(num_slots, np.int64)
        self.gateway_S = np.zeros(num_slots, np.int32)
        self.handle_S = np.zeros(num_slots, np.int64)
        self.last_token_s_S = np.zeros(num_slots, np.float64)
        self.num_appends = 0  # so that others see whether there are new tokens

    def join(self, slot: Slot, request: Request, *, num_cached_tokens: int, stop_ids: tuple[int, ...]) -> None:
        """A request takes the slot; its cached tokens count as computed."""
        num_known = len(request.token_ids_T)
        self.token_ids_SL[slot, :num_known] = request.token_ids_T
        self.token_ticks_SL[slot, num_known - len(request.token_ticks_T) : num_known] = request.token_ticks_T
        self.num_known_S[slot] = num_known
        self.num_scheduled_S[slot] = self.num_computed_S[slot] = num_cached_tokens
        self.limit_S[slot] = request.max_total_tokens
        self.first_stop_S[slot] = request.num_prompt_tokens + request.sampling.min_tokens
        self._set_stops(slot, stop_ids)
        self.has_grammar_S[slot] = request.matcher is not None
        self.generation_S[slot] += 1
        self.gateway_S[slot], self.handle_S[slot] = request.key
        self.last_token_s_S[slot] = np.nan if request.last_token_s is None else request.last_token_s

    def leave(self, slot: Slot, request: Request) -> None:
        """The request leaves the slot and takes its tokens and their times with it. Results of steps in flight are not
        applied to the slot any more."""
        request.token_ids_T = self.known_tokens(slot).copy()
        ticks_T = self.token_ticks_SL[slot, : self.num_known_S[slot]]
        request.token_ticks_T = ticks_T[request.num_given_tokens :].copy()
        last_token_s = float(self.last_token_s_S[slot])
        request.last_token_s = None if np.isnan(last_token_s) else last_token_s
        self.is_decoding_S[slot] = False
        self._set_stops(slot, ())
        self.generation_S[slot] += 1

    def known_tokens(self, slot: Slot) -> np.ndarray:
        """int32 view: prompt and output so far."""
        return self.token_ids_SL[slot, : self.num_known_S[slot]]

    def decodable(self) -> np.ndarray:
        """intp: slots whose next token can be scheduled, and is not known to be past the limit."""
        can_decode_S = self.is_decoding_S & (self.num_scheduled_S + 1 < self.limit_S)
        return can_decode_S.nonzero()[0]

    def append(self, slots_N: np.ndarray, tokens_N: np.ndarray, num_computed_N: np.ndarray, now_s: float) -> None:
        """Append one sampled token to each of these rows, which verifies what was computed before it."""
        self.num_appends += 1
        num_known_N = self.num_known_S[slots_N]
        self.token_ids_SL[slots_N, num_known_N] = tokens_N
        self.token_ticks_SL[slots_N, num_known_N] = tick(now_s)
        self.num_known_S[slots_N] = num_known_N + 1
        self.num_computed_S[slots_N] = num_computed_N
        self.last_token_s_S[slots_N] = now_s

    def _set_stops(self, slot: Slot, stop_ids: tuple[int, ...]) -> None:
        """stops_KS has as many rows as the slot with the most stop tokens needs, since each row costs time in each
        step."""
        self.stops_KS[:, slot] = NO_TOKEN
        self.num_stops_S[slot] = len(stop_ids)
        width, most = len(self.stops_KS), int(self.num_stops_S.max())
        if most > width:
            added = np.full((most - width, len(self.num_stops_S)), NO_TOKEN, np.int32)
            self.stops_KS = np.concatenate([self.stops_KS, added])
        elif most < width:
            self.stops_KS = self.stops_KS[:most].copy()
        self.stops_KS[: len(stop_ids), slot] = stop_ids


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightStep:
    """A planned step whose result is not known yet; once it has ended, also its outcome.

    A result belongs to a request only if the slot still has the generation that it had when the step was planned: slots
    change hands while steps are in flight.

    slots_A: intp. generations_A: int64. num_computed_A: int32, computed tokens of each row once the step is done.
    planned_s: the now_s that was passed to plan. launched_s, ended_s: set by the engine; ended_s: when the result was
    there. failed: "", or the name of the error that ended it.
    """

    plan: StepPlan
    num_sampled: int
    slots_A: np.ndarray
    generations_A: np.ndarray
    num_computed_A: np.ndarray
    planned_s: float = 0.0
    launched_s: float = 0.0
    ended_s: float = 0.0
    failed: str = ""

    @classmethod
    def of(cls, plan: StepPlan, slots: SlotState, now_s: float = 0.0) -> "InFlightStep":
        """Note which requests hold the slots right after planning, including those that join without tokens in it."""
        sampled = plan.sampled_slots
        others = [chunk.slot for chunk in plan.prefill if not chunk.is_last]
        if plan.new_requests:
            present = {*sampled.tolist(), *others}
            others += [new.slot for new in plan.new_requests if new.slot not in present]
        slots_A = (np.concatenate([sampled, np.asarray(others, np.int32)]) if others else sampled).astype(np.intp)
        return cls(
            plan=plan,
            num_sampled=len(sampled),
            slots_A=slots_A,
            generations_A=slots.generation_S[slots_A],
            num_computed_A=slots.num_scheduled_S[slots_A],
            planned_s=now_s,
        )

    def is_live_A(self, slots: SlotState) -> np.ndarray:
        """bool [A]: whether the request for which the row was planned still holds the slot."""
        return slots.generation_S[self.slots_A] == self.generations_A


def stop_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Sorted ids of the tokens that end an output with these parameters."""
    return tuple(sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}))


def find_ends(slots: SlotState, slots_N: np.ndarray, tokens_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two bool [N]: whether the row's last token is a stop token, and whether the row ends (stopped, or at its limit).
    Stop strings are checked by the gateway."""
    num_known_N = slots.num_known_S[slots_N]
    is_stop_N = (slots.stops_KS.take(slots_N, axis=1) == tokens_N).any(axis=0)
    is_stop_N &= num_known_N > slots.first_stop_S[slots_N]
    return is_stop_N, is_stop_N | (num_known_N >= slots.limit_S[slots_N])
