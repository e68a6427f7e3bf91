"""Octavo without its network, as one of the sides compared on a CPU: the real engine, scheduler, block manager and
runner in one thread of this process.

Must not know: the other sides, what is measured.
"""

import time
from collections.abc import Sequence

from bench.cpu.workloads import Ask, Clock
from bench.in_process import InProcess, blocks_of
from octavo.blockmgr.ids import PrefixCache
from octavo.model.causal_lm import CausalLM
from octavo.worker.loading.memory import keep_freed_memory
from octavo.worker.loading.warmup import warm_up
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512


class LocalEngine:
    """One of the sides. The prefix cache is off, so that repeated prompts save nothing."""

    name = "octavo"

    def __init__(
        self,
        model: CausalLM,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        clock: Clock = time.perf_counter,
        backend: str = "sdpa",
    ) -> None:
        config = TorchRunnerConfig(
            num_blocks=max_num_seqs * blocks_of(max_model_len, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_slots=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            backend=backend,
        )
        keep_freed_memory()
        runner = TorchRunner(model, config)
        warm_up(runner, max_batch_tokens=max_batch_tokens)
        self._clock = clock
        self._engine = InProcess(runner, config, max_batch_tokens=max_batch_tokens, prefix_cache=PrefixCache.OFF)

    def serve(self, asks: Sequence[Ask]) -> float:
        """See `Side.serve`."""
        start_s = self._clock()
        self.outputs(asks)
        return self._clock() - start_s

    def outputs(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The tokens of each request. Raises RuntimeError if an output does not have the requested length."""
        sampling = [(ask.prompt_ids_T, {"max_tokens": ask.num_output, "ignore_eos": True}) for ask in asks]
        outputs = self._engine.outputs(sampling)
        if [len(output) for output in outputs] != [ask.num_output for ask in asks]:
            raise RuntimeError(f"asked for {[a.num_output for a in asks]} tokens, got {[len(o) for o in outputs]}")
        return outputs
