"""Settings of a worker's model, memory, scheduler and constraints, shared by `octavo worker` and `octavo serve`."""

from typing import Literal

from octavo.cli.settings.setting import DAY_MS, INT32, MANY, MOST_SECONDS, Names, Settings, setting
from octavo.grammar.limits import GrammarLimits

DEFAULT_MODEL = "folio-chat"
PANEL = "Constraints"
MIB = 1024 * 1024


class ConstraintSettings(Settings):
    """How large a constraint may be; gateways refuse more, and workers compile no more."""

    max_schema_bytes: int = setting(
        65_536, "Bytes of a JSON schema, EBNF grammar or tools", panel=PANEL, ge=1, le=INT32
    )
    max_schema_depth: int = setting(16, "Schemas inside schemas", panel=PANEL, ge=1, le=64)

    @property
    def grammar_limits(self) -> GrammarLimits:
        """These limits, as `octavo.grammar` takes them."""
        return GrammarLimits(max_source_bytes=self.max_schema_bytes, max_depth=self.max_schema_depth)


class ConstraintCheckSettings(ConstraintSettings):
    """Constraints on a gateway."""

    constraint_timeout_s: float = setting(
        2.0, "Seconds of CPU time that checking a constraint may take", panel=PANEL, gt=0, le=MOST_SECONDS
    )


class GrammarSettings(ConstraintSettings):
    """Constraints on a worker."""

    grammar_timeout_s: float = setting(
        10.0, "Seconds that a request waits for its constraint to be compiled", panel=PANEL, gt=0, le=MOST_SECONDS
    )
    grammar_threads: int = setting(2, "Threads that compile constraints, per worker", panel=PANEL, ge=1, le=1024)
    grammar_cache_entries: int = setting(256, "Compiled constraints that a worker keeps", panel=PANEL, ge=0, le=MANY)
    grammar_cache_bytes: int = setting(256 * MIB, "Bytes that they may take, estimated", panel=PANEL, ge=0, le=2**50)


class ModelSettings(Settings):
    """What to load, and how it computes."""

    model: Names = setting(
        (DEFAULT_MODEL,),
        "Checkpoint folder, folio-chat (embedded), or Hugging Face id; NAME=CHECKPOINT serves it as NAME. "
        "serve: repeat for several models",
        panel="Model",
        min_length=1,
    )
    revision: str | None = setting(None, "Branch, tag or commit of a Hugging Face id", panel="Model")
    device: str = setting(
        "auto", "Device: auto, cpu, cuda or cuda:N; auto takes a GPU where there is one", panel="Model"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "Type of weights and activations; auto is the checkpoint's own", panel="Model"
    )
    quantization: Literal["none", "int8", "fp8", "int8-weights"] = setting(
        "none",
        "Round a plain checkpoint's weights to 8 bits at loading: int8 (GPUs; CPUs with a C compiler, which round what "
        "weights are multiplied with, too), int8-weights (weights alone, everywhere) or fp8 (GPUs of compute "
        "capability 8.9 and more). GPTQ and AWQ checkpoints need no flag",
        panel="Model",
    )
    load_format: Literal["checkpoint", "random"] = setting(
        "checkpoint",
        "Where weights come from. random: numbers of their scale, drawn on the device, to measure a shape whose "
        "config.json and tokenizer there are; no file of weights is read",
        panel="Model",
    )
    deterministic: bool = setting(
        False, "The same bits for a request whatever else is in the batch, at a price", panel="Model"
    )
    attention_backend: str = setting("auto", "Attention backend: auto, reference or sdpa", panel="Model")
    max_model_len: int | None = setting(
        None, "Prompt and output tokens together, at most; unset: the model's own limit", panel="Model", ge=2, le=2**24
    )
    num_threads: int | None = setting(
        None,
        "CPU threads of each rank; unset: the cores that a worker may use, divided among its ranks, and by "
        "`octavo serve` among a model's workers on the CPU",
        panel="Model", ge=1, le=1024,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1,
        "Processes of a worker that compute each step together, each with a part of the weights, and with a GPU of its "
        "own where there are GPUs",
        panel="Model", ge=1, le=64,
    )  # fmt: skip
    cpu_isa: Literal["auto", "avx2", "avx512", "vnni", "bf16", "amx"] = setting(
        "auto",
        "Best CPU instructions to use; hides better ones, to test what lesser CPUs do. auto: all that there are",
        panel="Model",
    )
    check_numerics: Literal["off", "on"] = setting(
        "off", "Report the first layer whose activations exceed a limit or turn NaN or infinite; slow", panel="Model"
    )
    check_numerics_limit: float | None = setting(
        None, "The limit; unset: half of what the type can hold, at most a million", panel="Model", gt=0, le=1e38
    )


class MemorySettings(Settings):
    """The KV pool."""

    memory_fraction: float = setting(
        0.9,
        "Share of the device's memory, as it is free before loading, that weights, the largest step and KV blocks take",
        panel="Memory",
        gt=0,
        le=1,
    )
    num_blocks: int | None = setting(
        None, "KV blocks, instead of sizing the pool from memory", panel="Memory", ge=1, le=2**26
    )
    host_kv_gib: float | None = setting(
        None,
        "Host memory for KV blocks that the device has no room for, in GiB, per worker; 0: none; unset: on GPUs a "
        "quarter of what is free, shared by all of them, but at most 16; on a CPU none",
        panel="Memory",
        ge=0,
        le=1_048_576,
        allow_inf_nan=False,
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "fp8 keeps keys and values as e4m3, twice as many tokens in the same memory; auto is the type of activations",
        panel="Memory",
    )
    block_size: int = setting(16, "Tokens of a KV block", panel="Memory", ge=1, le=256)
    prefix_cache: Literal["on", "off"] = setting(
        "on", "Whether prompts reuse blocks that earlier requests computed", panel="Memory"
    )


class SchedulingSettings(Settings):
    """How much runs at once."""

    max_num_seqs: int = setting(256, "Requests that run at once, per worker", panel="Scheduling", ge=1, le=65_536)
    max_waiting: int = setting(1024, "Requests that wait besides; more are refused", panel="Scheduling", ge=0, le=MANY)
    max_batch_tokens: int | None = setting(
        None,
        "Tokens of one engine step; unset: 8192 on a GPU, 512 on a CPU, where a long step would stall who decodes, "
        "or max_num_seqs where that is more",
        panel="Scheduling",
        ge=1,
        le=2**20,
    )
    max_chunk_tokens: int | None = setting(
        None, "Prompt tokens of one request in one step; unset: the whole step", panel="Scheduling", ge=1, le=2**20
    )
    max_gap_ms: float | None = setting(
        None,
        "Milliseconds that a step with prompts may take while outputs are generated beside them; 0: no limit; unset: "
        "no limit on a CPU; on a GPU 20, or more where 16 steps without prompts take longer or the next prompt has "
        "waited longer, up to 1.25 times what a step full of prompts' beginnings takes",
        panel="Scheduling",
        ge=0,
        allow_inf_nan=False,
        le=DAY_MS,
    )
    aging_s: float = setting(
        10.0, "Seconds of waiting after which a request goes first", panel="Scheduling", ge=0, le=MOST_SECONDS
    )


class OracleSettings(Settings):
    """A worker without a model, for tests of the system: tokens are hashes of what the block tables hold."""

    runner: Literal["torch", "oracle"] = setting("torch", "What executes the steps", panel="Tests", visibility="hidden")
    oracle_vocab_size: int = setting(
        1000, "Token ids of the oracle", panel="Tests", visibility="hidden", ge=2, le=INT32
    )
    oracle_step_delay_s: float = setting(
        0.0, "Seconds of an oracle step", panel="Tests", visibility="hidden", ge=0, le=MOST_SECONDS
    )
    oracle_eos_every: int | None = setting(
        None, "One token in so many ends the oracle's output", panel="Tests", visibility="hidden", ge=1, le=INT32
    )
    preempt_every_steps: int | None = setting(
        None, "Every so many steps a request gives way without need", panel="Tests", visibility="hidden", ge=2, le=INT32
    )
