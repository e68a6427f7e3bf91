"""A model that is ready to run, on any runner; and loading of the oracle."""

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.wire.messages import Capacity, ModelCard
from octavo.worker.config import SchedulerConfig, WorkerConfig
from octavo.worker.loading.model_card import CardError, Described, describe, served_name
from octavo.worker.loading.progress import OnProgress
from octavo.worker.runners.interface import Runner
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.oracle.runner import OracleRunner
from octavo.worker.runners.oracle.tokenizer import describe_oracle
from octavo.worker.runners.rank_figures import RankFigures

ORACLE_MODEL_LEN = 32_768
ORACLE_NUM_BLOCKS = 4_096
ORACLE_TOKEN_BYTES = 8  # an id and a position
MOST_ORACLE_HOST_BLOCKS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """From which `worker.main` assembles an engine. fingerprint: raw bytes, root of the prefix hashes. products: for
    people, how matrices are multiplied; may be empty. notes: what an operator should know about the model, for the log
    and the summary of the start. num_host_blocks, host_bytes, is_host_pinned: of the second tier. max_copies_in: blocks
    that one plan may copy back from it. read_ranks: reads what each rank of a tensor-parallel group measures; None with
    a single rank."""

    runner: Runner
    card: ModelCard
    tokenizer_files: dict[str, bytes]
    fingerprint: bytes
    num_blocks: int
    block_size: int
    scheduler: SchedulerConfig
    device: str
    notes: tuple[str, ...] = ()
    products: str = ""
    num_host_blocks: int = 0
    host_bytes: int = 0
    is_host_pinned: bool = False
    max_copies_in: int = 64
    read_ranks: Callable[[], list[RankFigures]] | None = None

    @property
    def capacity(self) -> Capacity:
        """The capacity that gateways are told."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_waiting=self.scheduler.max_waiting,
            max_batch_tokens=self.scheduler.max_batch_tokens,
        )

    @property
    def blocks_per_slot(self) -> int:
        """Width of the block table: blocks of a request of max_model_len tokens."""
        return -(-self.scheduler.max_model_len // self.block_size)


def model_len(config: WorkerConfig, described: Described) -> int:
    """The context length to serve. Raises CardError if more is asked for than the model has."""
    wanted = config.max_model_len
    if wanted is not None and wanted > described.max_model_len:
        why = "".join(f" ({note})" for note in described.notes)
        raise CardError(f"max_model_len {wanted} is more than the model's {described.max_model_len} positions{why}")
    return wanted or described.max_model_len


def scheduler_config(config: WorkerConfig, described: Described, *, max_in_flight: int) -> SchedulerConfig:
    """The scheduler's limits. Raises ValueError naming the field that does not fit."""
    return SchedulerConfig(
        max_model_len=model_len(config, described),
        vocab_size=described.vocab_size,
        eos_token_ids=described.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_batch_tokens=config.max_batch_tokens,
        max_chunk_tokens=config.max_chunk_tokens,
        max_gap_s=config.max_gap_s,
        max_gap_steps=config.max_gap_steps,
        max_in_flight=max_in_flight,
        aging_s=config.aging_s,
        preempt_every_steps=config.preempt_every_steps,
    )


def load_oracle(config: WorkerConfig, on_progress: OnProgress) -> Loaded:
    """The oracle under any model's name: with the tokenizer of the checkpoint folder, if ``model`` is a local folder or
    the name of an embedded one, else with its own. Imports no torch."""
    on_progress("reading_config", None, None)
    described = _describe_for_oracle(config)
    model = OracleModel(
        vocab_size=described.vocab_size, eos_token_ids=described.eos_token_ids, eos_every=config.oracle_eos_every
    )
    scheduler = scheduler_config(config, described, max_in_flight=1)
    fingerprint = hashlib.blake2b(repr(model).encode(), digest_size=32).digest()
    num_blocks = config.num_blocks or ORACLE_NUM_BLOCKS
    host_bytes = int((config.host_kv_gib or 0) * (1 << 30))
    num_host_blocks = min(host_bytes // (config.block_size * ORACLE_TOKEN_BYTES), MOST_ORACLE_HOST_BLOCKS)
    runner = OracleRunner(
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_slots=config.max_num_seqs,
        max_blocks_per_slot=-(-scheduler.max_model_len // config.block_size),
        max_in_flight=scheduler.max_in_flight,
        num_host_blocks=num_host_blocks,
        step_delay_s=config.oracle_step_delay_s,
    )
    return Loaded(
        runner=runner,
        card=described.card(
            name=config.served_name or served_name(config.model),
            fingerprint=fingerprint.hex(),
            dtype="oracle",
            max_model_len=scheduler.max_model_len,
        ),
        tokenizer_files=described.files,
        fingerprint=fingerprint,
        num_blocks=num_blocks,
        block_size=config.block_size,
        scheduler=scheduler,
        device="none",
        notes=described.notes,
        num_host_blocks=num_host_blocks,
        host_bytes=host_bytes,
    )


Meanwhile = Callable[[Described], None]
"""What to do once the checkpoint is known, while the start only waits for processes that compile kernels."""


def _describe_for_oracle(config: WorkerConfig) -> Described:
    for folder in (Path(config.model).expanduser(), _embedded_folder(config.model)):
        if folder is not None and (folder / "config.json").exists():
            return describe(folder)
    max_model_len = config.max_model_len or ORACLE_MODEL_LEN
    return describe_oracle(vocab_size=config.oracle_vocab_size, max_model_len=max_model_len)


def _embedded_folder(name: str) -> Path | None:
    """Where an embedded checkpoint would be, found without importing the model package, which needs torch."""
    spec = importlib.util.find_spec("octavo.model")
    if spec is None or not spec.submodule_search_locations or "/" in name:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "embedded" / name
