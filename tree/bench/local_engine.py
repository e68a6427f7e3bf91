"""Octavo without its network: the real engine, scheduler, block manager and runner in one thread of this process."""

import time
from collections import defaultdict
from collections.abc import Sequence

from bench.mailbox import GATEWAY, Mailbox, tokens_of
from bench.workloads import Ask, Clock
from blockmgr.config import BlockManagerConfig
from blockmgr.ids import PrefixCache
from blockmgr.manager import BlockManager
from model.qwen2 import Qwen2ForCausalLM
from wire.messages import Run, Sampling, StepOutput
from worker.config import SchedulerConfig
from worker.engine import Engine, EngineConfig
from worker.runner_warmup import warm_up
from worker.scheduler import Scheduler
from worker.torch_runner import TorchRunner, TorchRunnerConfig

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512


class _Mail(Mailbox):
    """tokens: by handle."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.num_finished = 0

    def take(self, output: StepOutput) -> None:
        """Keep the tokens."""
        for handle, token in tokens_of(output):
            self.tokens[handle].append(token)
        self.num_finished += len(output.finished)


class LocalEngine:
    """One of the sides. The prefix cache is off, so that nothing is saved by asking twice."""

    name = "octavo"

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        clock: Clock = time.perf_counter,
        backend: str = "sdpa",
    ) -> None:
        blocks_each = -(-(max_model_len + 1) // BLOCK_SIZE)
        runner = TorchRunner(
            model,
            TorchRunnerConfig(
                num_blocks=max_num_seqs * blocks_each,
                block_size=BLOCK_SIZE,
                max_slots=max_num_seqs,
                max_model_len=max_model_len,
                vocab_size=model.config.vocab_size,
                backend=backend,
            ),
        )
        warm_up(runner, max_batch_tokens=max_batch_tokens, on_progress=lambda done, total: None)
        blocks = BlockManager(
            BlockManagerConfig(
                num_blocks=max_num_seqs * blocks_each,
                block_size=BLOCK_SIZE,
                max_slots=max_num_seqs,
                max_blocks_per_slot=blocks_each,
                fingerprint=model.fingerprint,
                prefix_cache=PrefixCache.OFF,
            )
        )
        config = SchedulerConfig(
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max(max_batch_tokens, max_num_seqs),
        )
        self._mail, self._num_asked, self._clock = _Mail(), 0, clock
        self._engine = Engine(
            config=EngineConfig(epoch="bench", audit_every_steps=0),
            scheduler=Scheduler(config, blocks),
            blocks=blocks,
            runner=runner,
            inbox=self._mail,
            outbox=self._mail,
            clock=time.perf_counter,
        )

    def serve(self, asks: Sequence[Ask]) -> float:
        """See `Side.serve`."""
        start_s = self._clock()
        self.outputs(asks)
        return self._clock() - start_s

    def outputs(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The tokens of each. Raises RuntimeError where an output has another length than was asked for."""
        first, self._num_asked = self._num_asked, self._num_asked + len(asks)
        self._mail.coming = [(GATEWAY, _run(first + index, ask)) for index, ask in enumerate(asks)]
        while self._mail.num_finished < self._num_asked:
            self._engine.step()
        outputs = [self._mail.tokens.pop(first + index, []) for index in range(len(asks))]
        if [len(output) for output in outputs] != [ask.num_output for ask in asks]:
            raise RuntimeError(f"asked for {[a.num_output for a in asks]} tokens, got {[len(o) for o in outputs]}")
        return outputs


def _run(handle: int, ask: Ask) -> Run:
    sampling = Sampling(temperature=0.0, max_tokens=ask.num_output, ignore_eos=True)
    return Run(handle=handle, request_id=f"bench-{handle}", prompt_ids=ask.prompt_ids_T.tobytes(), sampling=sampling)
