"""A CUDA runner beside a torch runner with the same weights, driven by a scheduler or by plans written by hand.

Importable only if triton is installed.
"""

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.gpu.weights import GpuWeights
from octavo.wire.messages import SamplingParams
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, Launching
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.interface import Runner
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from octavo.worker.scheduler.plan import StepMasks, StepPlan, StepResult
from tests.support.worker.hand_plans import PlanWriter
from tests.support.worker.invariance import Limits
from tests.support.worker.scheduling import World, WorldConfig


class RunnerPair:
    """Launches both runners, compares their results, and returns the second one's."""

    def __init__(self, slow: Runner, fast: Runner) -> None:
        self.slow, self.fast = slow, fast
        self.max_in_flight = min(slow.max_in_flight, fast.max_in_flight)
        self.num_steps = 0
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Launch the plan on both."""
        self.slow.launch(plan)
        self.fast.launch(plan)
        self._plans.append(plan)

    def constrain(self, masks: StepMasks) -> None:
        """Give both the masks."""
        self.slow.constrain(masks)
        self.fast.constrain(masks)

    def collect(self) -> StepResult:
        """Collect both. Raises AssertionError if they differ by more than rounding."""
        plan = self._plans.popleft()
        slow, fast = self.slow.collect(), self.fast.collect()
        self.num_steps += 1
        assert (fast.step, fast.tokens_S.dtype) == (slow.step, np.dtype(np.int32))
        assert fast.is_finite_S.tolist() == slow.is_finite_S.tolist(), plan
        exhausted = [
            np.zeros(len(fast.tokens_S), np.bool_) if each is None else each
            for each in (fast.is_exhausted_S, slow.is_exhausted_S)
        ]
        assert exhausted[0].tolist() == exhausted[1].tolist(), plan
        has_token_S = ~exhausted[0]
        assert fast.tokens_S[has_token_S].tolist() == slow.tokens_S[has_token_S].tolist(), plan
        assert fast.logprobs.keys() == slow.logprobs.keys()
        for index, wanted in slow.logprobs.items():
            got = fast.logprobs[index]
            assert got.top_ids == wanted.top_ids
            np.testing.assert_allclose(
                [got.logprob, *got.top_logprobs], [wanted.logprob, *wanted.top_logprobs], atol=2e-3, rtol=1e-3
            )
        assert fast.prompt_logprobs.keys() == slow.prompt_logprobs.keys()
        for index, positions in slow.prompt_logprobs.items():
            assert [each.top_ids for each in fast.prompt_logprobs[index]] == [each.top_ids for each in positions]
            np.testing.assert_allclose(
                [each.logprob for each in fast.prompt_logprobs[index]],
                [each.logprob for each in positions],
                atol=2e-3,
                rtol=1e-3,
            )
        assert fast.embeddings.keys() == slow.embeddings.keys()
        for index, embedding_D in slow.embeddings.items():
            np.testing.assert_allclose(fast.embeddings[index], embedding_D, atol=2e-3, rtol=1e-3)
        return fast

    def close(self) -> None:
        """Close both."""
        self.slow.close()
        self.fast.close()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 120
BLOCK = 4
CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
# As wide as a real model, for a real device.
WIDE = ModelConfig(
    vocab_size=128,
    hidden_size=896,
    intermediate_size=1216,
    num_hidden_layers=3,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
# Strong enough that every parameter changes tokens.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 60.0},
    {"temperature": 0.0, "frequency_penalty": 300.0, "num_logprobs": 2},
    {"temperature": 60.0, "top_k": 6, "top_p": 0.9, "presence_penalty": 150.0},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 60.0, "min_p": 0.5, "min_tokens": 3, "stop_token_ids": (5, 6)},
    {"temperature": 60.0, "logit_bias": {9: 40.0, 3: -100.0}, "typical_p": 0.7, "num_logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(0, 120, 3)), "bad_words": ((0, 3), (6,), (9, 12, 15))},
    {"temperature": 60.0, "top_n_sigma": 1.0},
]


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A random model with clearly different logits and varied outputs."""
    model = CausalLM.random(config, seed=4, dtype=dtype, device=DEVICE)
    for parameter in model.parameters():
        parameter.data *= 8 if config.hidden_size < 100 else 3
    return model


def runner_pair(
    model_config: ModelConfig = CONFIG,
    *,
    num_blocks: int = 64,
    max_slots: int = 4,
    max_model_len: int = 48,
    max_batch_tokens: int = 24,
    launching: Launching = Launching.EAGER,
    num_host_blocks: int = 0,
    max_copies_in: int = 64,
) -> RunnerPair:
    """Two runners over pools of NaN, so that any read of unwritten memory shows; each with its own host blocks."""
    common: dict[str, Any] = {
        "num_blocks": num_blocks, "block_size": BLOCK, "max_slots": max_slots, "max_model_len": max_model_len,
        "vocab_size": VOCAB, "eos_token_ids": (7,), "max_in_flight": 2,
    }  # fmt: skip
    model = random_model(model_config)
    hosts = [_host_blocks(model_config, model.dtype, num_host_blocks, pinned=pinned) for pinned in (False, True)]
    slow = TorchRunner(model, TorchRunnerConfig(**common), host_blocks=hosts[0])
    weights = GpuWeights.take(random_model(model_config), max_positions=max_model_len + BLOCK)
    config = CudaRunnerConfig(
        **common, launching=launching, max_batch_tokens=max_batch_tokens, max_copies_in=max_copies_in
    )
    fast = CudaRunner(weights, config, host_blocks=hosts[1])
    fast.record()
    slow.kv.k_pool_LPKBH.fill_(torch.nan)
    slow.kv.v_pool_LPKBH.fill_(torch.nan)
    fast.graphs.kv.k_pool_LPKBH[:, :-1] = torch.nan
    fast.graphs.kv.v_pool_LPKBH[:, :-1] = torch.nan
    return RunnerPair(slow, fast)


def _host_blocks(config: ModelConfig, dtype: torch.dtype, num_blocks: int, *, pinned: bool) -> HostBlocks | None:
    if not num_blocks:
        return None
    row_bytes = kv_block_bytes(config, block_size=BLOCK, dtype=dtype)
    return HostBlocks(num_blocks, row_bytes, is_pinned=pinned and DEVICE == "cuda", part_bytes=7 * row_bytes)


def cuda_runner(
    model_config: ModelConfig,
    limits: Limits,
    *,
    launching: Launching = Launching.EAGER,
    deterministic: Deterministic = Deterministic.ON,
    dtype: torch.dtype = torch.float32,
) -> CudaRunner:
    """A CUDA runner alone, in deterministic mode unless told otherwise, over a pool of NaN."""
    weights = GpuWeights.take(random_model(model_config, dtype), max_positions=limits.max_model_len + limits.block_size)
    config = CudaRunnerConfig(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_slots=limits.max_slots,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_batch_tokens=limits.max_batch_tokens,
        launching=launching,
        deterministic=deterministic,
    )
    runner = CudaRunner(weights, config)
    runner.record()
    runner.graphs.kv.k_pool_LPKBH[:, :-1] = torch.nan
    runner.graphs.kv.v_pool_LPKBH[:, :-1] = torch.nan
    return runner


def world(
    runner: RunnerPair,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_blocks: int,
    max_slots: int = 4,
    max_model_len: int = 48,
    max_batch_tokens: int = 24,
    num_host_blocks: int = 0,
    max_copies_in: int = 64,
) -> World:
    """A scheduler that drives the runner."""
    config = WorldConfig(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_copies_in=max_copies_in,
        block_size=BLOCK,
        max_num_seqs=max_slots,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        max_in_flight=runner.max_in_flight,
        model=OracleModel(vocab_size=VOCAB, eos_token_ids=()),
    )
    monkeypatch.setattr(WorldConfig, "runner", lambda self: runner)
    return World(config)


class Hand(PlanWriter):
    """A runner whose plans are written by hand; blocks are dealt in a shuffled order."""

    def __init__(self, runner: RunnerPair) -> None:
        super().__init__(np.random.default_rng(0).permutation(64).tolist(), block_size=BLOCK)
        self.runner = runner

    def join(self, slot: int, tokens: list[int], **sampling: object) -> None:  # type: ignore[override]
        """See PlanWriter.join. sampling: greedy unless it says otherwise."""
        super().join(slot, tokens, SamplingParams(**{"temperature": 0.0, **sampling}))  # type: ignore[arg-type]

    def launch(self, **what: Any) -> None:
        """Launch the plan of these arguments."""
        self.runner.launch(self.plan(**what))

    def step(self, **what: Any) -> list[int]:
        """Launch, collect, and return the tokens."""
        self.launch(**what)
        return self.runner.collect().tokens_S.tolist()

    @staticmethod
    def bare(step: int, decode: dict[int, int]) -> StepPlan:
        """Decodes and nothing else."""
        return StepPlan(
            step=step,
            decode_slots_S=np.asarray(list(decode), np.int32),
            decode_positions_S=np.asarray(list(decode.values()), np.int32),
        )


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
