"""From a seed to a scenario: odd configurations, some features and fault classes on, others off (swarm testing; Groce
et al., 2012). Pure: a seed and a size give the same scenario everywhere.
"""

import math
import random

import msgspec

from sim.faults.triggered import MOVING
from sim.processes.dealer import LIES
from sim.processes.runner import NAN_TOKEN, POISON_TOKEN
from sim.scenario import OF_RANKS, TRIGGERED, Fault, FaultKind, RequestSpec, Scenario, SimConfig, Tenant

MEAN_OUTPUT_TOKENS = 8
STOPS = ("1", "w2", " w3", "a", "é", "34", "w1 ")
POINTS = ("engine.launched", "engine.applied", "engine.added", "engine.paused")
COPYING_POINT = "engine.copying"  # only where there is a second tier
DEFECT_POINTS = ("pool.opening", "delivery.written")
_K = FaultKind
_STALLS = ((_K.STALL, "begun"),) * 6
# By rush. First those that wait for a place which takes others to come about.
_LURKING = (
    (
        *_STALLS,
        *_STALLS[:2],
        *((_K.HANG_UP, place) for place in ("waiting", "preempted", "following", "leading", "paused", "parked")),
        (_K.CANCEL_OUTPUT, "following"),
        (_K.CANCEL_OUTPUT, "running"),
        (_K.FAIL, "waiting"),
        (_K.FAIL, "paused"),
        (_K.FAIL_STEP, "leading"),
    ),
    (
        *_STALLS,
        (_K.CANCEL_OUTPUT, "following"),
        (_K.HANG_UP_AND_CRASH, "paused"),
        (_K.CRASH_WHEN, "paused"),
        (_K.HANG_UP, MOVING),
    ),
    (
        *_STALLS,
        (_K.CANCEL_OUTPUT, "following"),
        (_K.HANG_UP, "parked"),
        (_K.DISCONNECT_WHEN, "paused"),
        (_K.HANG_UP, MOVING),
    ),
    ((_K.HANG_UP_AND_CRASH, "running"), (_K.HANG_UP, MOVING), (_K.FAIL, "running")),
)
RUSH_AFTER_S = 50.0  # what was frozen, hung or cut off is back then
RUSH_S = 15.0
MAX_RUSHING = 12  # requests
TENANTS = ("", "acme", "zen")


def scenario_of(seed: int, *, num_requests: int) -> Scenario:
    """The whole run of a seed."""
    config = _config(random.Random(f"{seed}:config"))
    rng = random.Random(f"{seed}:load")
    step_s = config.step_base_s + config.step_seq_s * config.max_num_seqs
    capacity = config.num_workers * config.max_num_seqs / (step_s * MEAN_OUTPUT_TOKENS)
    rate = capacity * rng.choice((0.1, 0.3, 0.6, 0.9, 1.5))
    horizon_s = max(num_requests / rate, rng.choice((0.0, 5.0, 20.0)))  # downtimes must not be all of it
    config = msgspec.structs.replace(config, tenants=_tenants(config, random.Random(f"{seed}:tenants")))
    config = _with_host_tier(config, random.Random(f"{seed}:host"))
    num_rushing = min(num_requests // 8, MAX_RUSHING) * len(_LURKING)
    config = _with_ranks(config, random.Random(f"{seed}:ranks"))
    requests = _Requests(config, random.Random(f"{seed}:requests"), horizon_s).many(num_requests - num_rushing)
    faults = _faults(config, random.Random(f"{seed}:faults"), horizon_s)
    faults = _some_while_copying(faults, config, random.Random(f"{seed}:copying"))
    faults += _of_ranks(config, random.Random(f"{seed}:faults of ranks"), horizon_s)
    rush, triggered = _rushes(config, random.Random(f"{seed}:rush"), num_rushing, horizon_s + RUSH_AFTER_S)
    requests += tuple(msgspec.structs.replace(spec, index=len(requests) + spec.index) for spec in rush)
    faults = tuple(sorted((*faults, *triggered), key=lambda fault: fault.at_s))
    return Scenario(seed=seed, config=config, requests=requests, faults=faults)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _config(rng: random.Random) -> SimConfig:
    block_size, num_blocks = _log_uniform(rng, 1, 32), _log_uniform(rng, 8, 4096)
    max_num_seqs = 1 if rng.random() < 0.1 else _log_uniform(rng, 2, 32)
    max_prefill_tokens, max_chunk_tokens = _log_uniform(rng, 1, 256), rng.choice((None, 1, 7, 16))
    # Forced preemption, a knob for tests, must leave a request the steps that its prompt takes.
    least_prefill = min(max_prefill_tokens, max_chunk_tokens or 256)
    max_model_len = _log_uniform(rng, 8, 256) if rng.random() < 0.2 else rng.randint(64, 160)
    if rng.random() < 0.7:  # too little for those that run: requests are preempted all the time
        num_tokens = max(max_model_len * 1.1, max_num_seqs * rng.uniform(15.0, 50.0))
        num_blocks = max(8, round(num_tokens / block_size))
    return SimConfig(
        num_workers=rng.choice((1, 2, 2, 3)),
        num_gateways=rng.choice((1, 1, 2)),
        num_blocks=num_blocks,
        block_size=block_size,
        has_prefix_cache=rng.random() < 0.75,
        max_num_seqs=max_num_seqs,
        max_waiting=rng.choice((0, 4, 32, 32, 256, 256)),
        max_batch_tokens=max_num_seqs + max_prefill_tokens,
        max_chunk_tokens=max_chunk_tokens,
        max_in_flight=rng.choice((1, 2)),
        max_model_len=max_model_len,
        aging_s=rng.choice((0.0, 0.5, 10.0)),
        preempt_every_steps=rng.choice((None, 3 if least_prefill > 128 else 10 if least_prefill > 15 else None)),
        eos_every=rng.choice((None, 10, 40)),
        step_base_s=rng.choice((0.001, 0.005, 0.03)),
        jitter=rng.choice((0.0, 0.2, 0.9)),
        link_delay_s=rng.choice((0.0001, 0.001, 0.02)),
        high_water=rng.choice((2000, 2000, 20)),
        window_bytes=rng.choice((65_536, 256, 0)),
        heartbeat_interval_s=rng.choice((0.5, 1.0)),
        stall_timeout_s=rng.choice((10.0, 30.0)),
        write_stall_s=rng.choice((5.0, 30.0)),
        max_pending_tokens=rng.choice((16_384, 8)),
        max_requests=rng.choice((4096, 4096, 4096, 16)),
        restart_s=rng.choice((0.3, 0.3, 3.0)),
        max_moves=rng.choice((0, 1, 3, 3)),
        move_timeout_s=rng.choice((1.0, 60.0)),
        is_watched=rng.random() < 0.7,
        poisons=rng.random() < 0.7,
        audit_every_steps=1 if num_blocks < 100 else rng.choice((10, 50)),
        pause_pending_tokens=rng.choice((1, 1, 1, 1, 3, 3, 3, 512)),
    )


def _some_while_copying(faults: tuple[Fault, ...], config: SimConfig, rng: random.Random) -> tuple[Fault, ...]:
    """Where there is a second tier, some workers die in the middle of copies to it or back."""
    return tuple(
        msgspec.structs.replace(fault, detail=COPYING_POINT)
        if config.num_host_blocks and fault.kind is FaultKind.CRASH_AT and rng.random() < 0.5
        else fault
        for fault in faults
    )


def _with_host_tier(config: SimConfig, rng: random.Random) -> SimConfig:
    """In half of the seeds: too small for what is evicted or ample, and copies that are sooner than computing or
    not."""
    if rng.random() < 0.5:
        return config
    return msgspec.structs.replace(
        config,
        num_host_blocks=max(1, round(config.num_blocks * rng.choice((0.2, 1.0, 5.0)))),
        max_copies_in=rng.choice((1, 4, 64)),
        copy_s=config.step_prefill_s * config.block_size * rng.choice((0.01, 0.1, 3.0)),
    )


def _with_ranks(config: SimConfig, rng: random.Random) -> SimConfig:
    """In a third of the seeds workers are groups."""
    return msgspec.structs.replace(config, num_ranks=rng.choice((1, 1, 1, 1, 2, 4)))


def _of_ranks(config: SimConfig, rng: random.Random, horizon_s: float) -> tuple[Fault, ...]:
    """What happens to one of a group's ranks and not to the others."""
    if config.num_ranks == 1:
        return ()
    return tuple(
        Fault(
            kind=rng.choice((FaultKind.RANK_DIES, FaultKind.RANK_DIES, FaultKind.RANK_STOPS)),
            at_s=round(rng.uniform(0, horizon_s), 6),
            worker=rng.randrange(config.num_workers),
            detail=str(rng.randrange(1, config.num_ranks)),
        )
        for _ in range(rng.choice((0, 1, 3)))
    )


def _tenants(config: SimConfig, rng: random.Random) -> tuple[Tenant, ...]:
    """In some seeds callers have keys; some of the tenants limits, large ones and such that always bind."""
    if rng.random() < 0.5:
        return ()
    return tuple(_tenant(name, config, rng) for name in TENANTS if name)


def _tenant(name: str, config: SimConfig, rng: random.Random) -> Tenant:
    room = config.max_num_seqs + config.max_waiting
    rate = rng.choice((None, None, 600, 60_000))
    return Tenant(
        name=name,
        weight=rng.choice((1, 1, 2, 7)),
        max_requests=rng.choice((None, None, 9, max(1, room // 2), 2 * room)),
        max_queued=rng.choice((None, None, 9, max(1, config.max_num_seqs // 2))),
        tokens_per_minute=rate,
        burst_tokens=rng.choice((None, 400)) if rate else None,
    )


class _Requests:
    """Callers of a few tenants, whose prompts share beginnings."""

    def __init__(self, config: SimConfig, rng: random.Random, horizon_s: float) -> None:
        self._config, self._rng, self._horizon_s = config, rng, horizon_s
        self._has = {
            name: rng.random() < share
            for name, share in {
                "cancels": 0.5,
                "deadlines": 0.5,
                "stalls": 0.8,
                "priorities": 0.5,
                "stops": 0.5,
                "logprobs": 0.5,
                "duplicates": 0.5,
                "retries": 0.8,
                "tenants": 0.5,
                "bursts": 0.7,
                "unary": 0.5,
                "outputs": 0.8,
            }.items()
        }
        self._nan = 0.01 if rng.random() < 0.5 else 0.0
        self._poison = 0.003 if rng.random() < 0.3 else 0.0
        self._max_prompt = max(1, min(_room(config) * 2 // 3, 96))
        self._bases = [self._ids(rng.randint(1, self._max_prompt)) for _ in range(6)]

    def many(self, num_requests: int) -> tuple[RequestSpec, ...]:
        arrivals = [self._rng.uniform(0, self._horizon_s) for _ in range(num_requests)]
        if self._has["bursts"]:
            burst_s = self._horizon_s / 3
            arrivals = [round(at_s / burst_s) * burst_s if self._rng.random() < 0.7 else at_s for at_s in arrivals]
        return tuple(self._one(index, round(at_s, 6)) for index, at_s in enumerate(sorted(arrivals)))

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(3, NAN_TOKEN) for _ in range(length))

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        base = rng.choice(self._bases)
        prompt = base[: rng.randint(1, len(base))] if rng.random() < 0.3 else base
        if rng.random() < 0.7:
            prompt += self._ids(rng.randint(1, max(1, self._max_prompt // 2)))
        prompt = prompt if rng.random() < 0.02 else prompt[: self._max_prompt]
        if rng.random() < self._nan:
            return (*prompt[:-1], NAN_TOKEN)
        return (*prompt[:-1], POISON_TOKEN) if rng.random() < self._poison else prompt

    def _num_outputs(self) -> int:
        """Often one; at most what a worker can hold, running or waiting."""
        config = self._config
        return min(self._rng.choice((1, 1, 1, 1, 2, 3, 5, 9)), config.max_num_seqs + config.max_waiting)

    def _one(self, index: int, at_s: float) -> RequestSpec:
        rng, has = self._rng, self._has
        output = rng.choice(("ids", "ids", "text", "both"))
        max_tokens = rng.choice((1, rng.randint(1, 6), rng.randint(1, 24), rng.randint(24, 96)))
        stops = has["stops"] and output != "ids" and rng.random() < 0.3
        return RequestSpec(
            index=index,
            at_s=at_s,
            prompt=self._prompt(),
            max_tokens=max_tokens,
            seed=rng.getrandbits(64),
            gateway=rng.randrange(self._config.num_gateways),
            tenant=rng.choice(TENANTS) if has["tenants"] or self._config.tenants else "",
            request_id=f"r{rng.randrange(index + 1)}" if has["duplicates"] and rng.random() < 0.05 else "",
            min_tokens=rng.randint(0, max_tokens) if not stops and rng.random() < 0.2 else 0,
            ignore_eos=rng.random() < 0.1,
            stop_token_ids=self._ids(rng.randint(1, 9)) if rng.random() < 0.1 else (),
            stop_strings=(rng.choice(STOPS),) if stops else (),
            output=output,
            logprobs=rng.randrange(3) if has["logprobs"] and rng.random() < 0.2 else None,
            priority=rng.randint(-1, 2) if has["priorities"] else 0,
            is_unary=has["unary"] and rng.random() < 0.2,
            timeout_s=rng.choice((0.001, 0.05, 0.5, 5.0, 60.0)) if has["deadlines"] and rng.random() < 0.4 else None,
            cancel_after_s=round(rng.expovariate(8.0), 6) if has["cancels"] and rng.random() < 0.3 else None,
            pace_s=rng.choice((0.0, 0.0, 0.01, 0.2)) if has["stalls"] else 0.0,
            stall_after=rng.randint(1, 3) if has["stalls"] and rng.random() < 0.1 else None,
            stall_s=rng.choice((0.5, 10.0, 60.0)),
            retries=rng.choice((0, 2, 6)) if has["retries"] else 0,
            num_outputs=self._num_outputs() if has["outputs"] else 1,
        )


def _faults(config: SimConfig, rng: random.Random, horizon_s: float) -> tuple[Fault, ...]:
    kinds = [kind for kind in FaultKind if kind not in TRIGGERED | OF_RANKS and rng.random() < 0.4]
    if not kinds:
        return ()
    faults = [_fault(config, rng, rng.choice(kinds), horizon_s) for _ in range(rng.choice((0, 1, 3, 8, 20)))]
    return tuple(faults)


def _rushes(
    config: SimConfig, rng: random.Random, num_requests: int, start_s: float
) -> tuple[tuple[RequestSpec, ...], tuple[Fault, ...]]:
    """Four bursts of long outputs, more than run at once, on a service that has been well for a while; in most seeds
    callers leave, stall and fail when their outputs are where few ever are, and later workers die of it."""
    requests, faults = list[RequestSpec](), list[Fault]()
    for index, kinds in enumerate(_LURKING):
        at_s = start_s + index * RUSH_S
        num, first = num_requests // len(_LURKING), index * (num_requests // len(_LURKING))
        requests += [_rusher(config, rng, number + first, num, at_s) for number in range(num)]
        if rng.random() < 0.9:
            faults += [_lurks(kind, place, rng, at_s) for kind, place in kinds]
    return tuple(requests), tuple(faults)


def _rusher(config: SimConfig, rng: random.Random, index: int, num: int, at_s: float) -> RequestSpec:
    """index: among those who rush. All of them together have two to four times the outputs that run at once."""
    room = _room(config)
    length = rng.randint(1, max(1, min(room // 3, 48)))
    return RequestSpec(
        index=index,
        at_s=round(at_s + rng.uniform(0.0, 3.0) * config.step_base_s, 6),
        prompt=tuple(rng.randrange(3, NAN_TOKEN) for _ in range(length)),
        max_tokens=max(1, min(room - length, rng.choice((24, 48)))),
        seed=rng.getrandbits(64),
        gateway=rng.randrange(config.num_gateways),
        ignore_eos=True,
        output=rng.choice(("ids", "text")),
        num_outputs=min(
            rng.choice((2, 4)) * max(1, config.max_num_seqs // num), config.max_num_seqs + config.max_waiting, 10
        ),
        retries=8,
    )


def _lurks(kind: FaultKind, place: str, rng: random.Random, start_s: float) -> Fault:
    """From the beginning of a rush on, or a little later."""
    duration_s = rng.choice((2.0, 8.0)) if kind is FaultKind.STALL else 0.0
    at_s = start_s + rng.choice((0.0, 0.0, 0.05))
    return Fault(kind=kind, at_s=round(at_s, 6), duration_s=duration_s, detail=place)


def _room(config: SimConfig) -> int:
    return min(config.max_model_len, config.num_blocks * config.block_size)


def _fault(config: SimConfig, rng: random.Random, kind: FaultKind, horizon_s: float) -> Fault:
    durations = {
        FaultKind.FREEZE: (0.5, 3.0, 8.0, 20.0),
        FaultKind.SLOW: (1.0, 10.0),
        FaultKind.PARTITION: (0.3, 4.0, 7.0, 15.0),
        FaultKind.LAG: (0.05, 1.0),
        FaultKind.DRAIN_WORKER: (0.0, 0.2, 5.0),
        FaultKind.DRAIN_GATEWAY: (0.0, 0.2, 5.0),
    }
    details = {FaultKind.LIE: LIES, FaultKind.CRASH_AT: POINTS, FaultKind.DEFECT: DEFECT_POINTS}
    return Fault(
        kind=kind,
        at_s=round(rng.uniform(0, horizon_s), 6),
        worker=rng.randrange(config.num_workers),
        gateway=rng.randrange(config.num_gateways),
        duration_s=rng.choice(durations.get(kind, (0.0,))),
        detail=rng.choice(details.get(kind, ("",))),
    )
