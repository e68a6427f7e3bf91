"""From a checkpoint folder to a model, strictly: every tensor that is missing, unexpected, misshapen or of a dtype that
is not a weight's is named in one error, before any weight is read.

Must not know: hubs, requests.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

import torch

from octavo.model.causal_lm import VECTOR_DEVIATION, CausalLM, LayerMatrices
from octavo.model.checkpoint.fingerprint import fingerprint
from octavo.model.checkpoint.packed import OnTensors, Packed, PackedWeights, packed_dtype
from octavo.model.checkpoint.safetensors_file import TORCH_DTYPES, part_bytes
from octavo.model.checkpoint.shards import Shards, open_shards
from octavo.model.checkpoint.weight_names import EMBEDDING, HEAD, destinations
from octavo.model.config import load_config
from octavo.model.errors import CheckpointError, ConfigError
from octavo.model.parallel import ALONE, Part, Ranks, part_of

OnBytes = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as work goes on."""

SCAN_ELEMENTS = 1 << 22


class WeightScan(Enum):
    """Whether loading looks at every weight for NaN and infinity (a second pass over the memory)."""

    OFF = "off"
    FINITE = "finite"


def ignore_progress(_done: int, _total: int) -> None:
    """For callers that show no bar."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    on_progress: OnBytes = ignore_progress,
    weight_scan: WeightScan = WeightScan.OFF,
    packed: Packed = Packed.UNPACKED,
    ranks: Ranks = ALONE,
) -> CausalLM:
    """Load a checkpoint in HF layout: config.json and safetensors, single or sharded, plain or packed by GPTQ or AWQ.

    dtype: see `ModelConfig.computed_in`. packed: what becomes of packed matrices. ranks: with several, each reads only
    its part of the weights. Raises CheckpointError (ConfigError for config.json). Nothing in the folder is ever
    executed.
    """
    folder = Path(folder)
    config = load_config(folder)
    with ExitStack() as stack:
        shards = open_shards(folder, stack)
        chosen = config.computed_in(dtype)
        plain = CausalLM(config, dtype=chosen, device="meta")
        weights = PackedWeights.of(plain, ranks)
        beside = check_tensors(shards, plain, weights)
        matrices = LayerMatrices.DEFERRED if weights.is_any else LayerMatrices.ALLOCATED
        model = CausalLM(config, dtype=chosen, device=device, layer_matrices=matrices, ranks=ranks)
        cuts = weights.cuts()
        names = shards.file_of.keys() - cuts - beside
        parts = {name: part_of(name, shards.entry(name).shape, config, ranks) for name in names}
        progress = _Progress(
            {name: part_bytes(shards.entry(name), part) for name, part in (parts | cuts).items()}, on_progress
        )
        weights.read(shards, model, packed, progress)
        read_weights(shards, model, parts, progress)
        check_idle(shards, beside)
    if weight_scan is WeightScan.FINITE:
        check_finite(model)
    model.fingerprint = fingerprint(model)
    return model


def check_checkpoint(folder: Path) -> None:
    """The checks that `load_model` makes before it reads any weight: config.json, the list of files, their headers.
    Raises CheckpointError."""
    folder = Path(folder)
    plain = CausalLM(load_config(folder), dtype=torch.float32, device="meta")
    with ExitStack() as stack:
        check_tensors(open_shards(folder, stack), plain, PackedWeights.of(plain))


def draw_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ranks: Ranks = ALONE,
) -> CausalLM:
    """The model that a folder's config.json describes, with random weights drawn on the device at a scale that keeps
    activations finite. Weight files are not read; with several ranks, each draws only its part. dtype: see
    `load_model`. Raises ConfigError, also for packed weights."""
    config = load_config(Path(folder))
    if config.quantization is not None:
        raise ConfigError("quantization_config", "packed weights cannot be drawn, only read")
    model = CausalLM(config, dtype=config.computed_in(dtype), device=device, ranks=ranks)
    generator = torch.Generator(model.device).manual_seed(ranks.rank)
    for name, parameter in model.named_parameters():
        deviation = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else VECTOR_DEVIATION
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data.normal_(mean, deviation, generator=generator)
    model.fingerprint = fingerprint(model)
    return model


def expected_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, according to the config."""
    return {name: tuple(view.shape) for name, view in destinations(model).items()}


def check_tensors(shards: Shards, plain: CausalLM, weights: PackedWeights) -> set[str]:
    """Compare headers with the config. Returns the names of additional tensors that are allowed if they hold zeros.
    Raises CheckpointError with every difference."""
    shapes = weights.replace_shapes(expected_shapes(plain))
    idle = weights.idle_biases(shapes)
    allowed = shapes | idle
    problems = [f"{name}: missing, should have shape {list(shape)}" for name, shape in shapes.items()
                if name not in shards.file_of]  # fmt: skip
    for name, file in shards.file_of.items():
        entry, wanted = file.entries[name], wanted_shape(name, allowed)
        if wanted is None:
            problems.append(f"{file.path.name}: {name}: unexpected")
        elif entry.shape != wanted:
            problems.append(f"{file.path.name}: {name}: has shape {list(entry.shape)}, should have {list(wanted)}")
        elif entry.dtype not in packed_dtype(name, TORCH_DTYPES):
            dtypes = ", ".join(packed_dtype(name, TORCH_DTYPES))
            problems.append(f"{file.path.name}: {name}: is {entry.dtype}, should be one of {dtypes}")
    if problems:
        what = f"{len(problems)} tensors do not fit config.json:"
        if len(problems) == 1:
            what = "one tensor does not fit config.json:"
        raise CheckpointError(what, tuple(sorted(problems)))
    return idle.keys() & shards.file_of.keys()


def check_idle(shards: Shards, names: Iterable[str]) -> None:
    """Biases that the model does not use must be zero. Raises CheckpointError."""
    for name in sorted(names):
        file = shards.file_of[name]
        bias_O = torch.empty(shards.entry(name).shape, dtype=torch.float32)
        file.read(name, bias_O, (slice(0, len(bias_O)),))
        if bool(bias_O.count_nonzero()):
            raise CheckpointError(f"{file.path.name}: {name}: is not zero, and the model adds no bias there")


def wanted_shape(name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The expected shape; None if the tensor does not belong. A tied checkpoint may also contain the head, which must
    equal the embedding."""
    return shapes.get(name, shapes[EMBEDDING] if name == HEAD else None)


class _Progress:
    """Reports how many bytes of all tensors were read. bytes_of: what this rank reads of each."""

    def __init__(self, bytes_of: dict[str, int], on_progress: OnBytes) -> None:
        self._bytes_of, self._on_progress = bytes_of, on_progress
        self._done, self._total = 0, sum(bytes_of.values())

    def __call__(self, names: Iterable[str]) -> None:
        self._done += sum(self._bytes_of[name] for name in names)
        self._on_progress(self._done, self._total)


def read_weights(shards: Shards, model: CausalLM, parts: dict[str, Part], on_tensors: OnTensors) -> None:
    """Read tensors, or this rank's parts of them, into place, file by file in byte order."""
    views = destinations(model)
    for name in sorted(parts, key=lambda name: (shards.file_of[name].path.name, shards.entry(name).start)):
        if name in views:
            shards.file_of[name].read(name, views[name], parts[name])
        on_tensors([name])
    if HEAD in shards.file_of and HEAD not in views:
        check_tied_head(shards, model, parts[HEAD])


def check_tied_head(shards: Shards, model: CausalLM, part: Part) -> None:
    """A head stored beside tied embeddings must hold the same values. Raises CheckpointError."""
    file, embedding = shards.file_of[HEAD], model.embed_tokens.weight.data
    head = torch.empty_like(embedding)
    file.read(HEAD, head, part)
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{file.path.name}: {HEAD}: differs from {EMBEDDING} although config.json has tie_word_embeddings true"
        )


def check_finite(model: CausalLM) -> None:
    """Check every weight. Raises CheckpointError naming each tensor with NaN or infinity, and how many."""
    problems = []
    for name, view in destinations(model).items():
        pieces = view.reshape(-1).split(SCAN_ELEMENTS)
        num_bad = sum(int((~piece.isfinite()).sum()) for piece in pieces)
        if num_bad:
            problems.append(f"{name}: {num_bad} of {view.numel()} values are NaN or infinite in {model.dtype}")
    if problems:
        raise CheckpointError("the weights are not finite:", tuple(problems))
