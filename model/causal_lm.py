"""A dense language model of any served family: embedding, decoder layers, final norm, head.

Legend: T tokens in this step · S sampled or wanted rows · D model dim · V vocabulary.
Must not know: files, requests, who owns a block, how tokens are chosen.
"""

from collections.abc import Callable
from enum import Enum
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from octavo.model.attention.interface import AttentionBackend, AttentionInputs
from octavo.model.attention.kv_pool import KvPool
from octavo.model.checkpoint.fingerprint import fingerprint
from octavo.model.config import ModelConfig
from octavo.model.layers.decoder import DecoderLayer, PagedOps, RmsNorm, Rope
from octavo.model.layers.linear import Addend, Linear, WeightFormat
from octavo.model.parallel import ALONE, Ranks, config_of_rank

TakeHidden = Callable[[int, torch.Tensor], None]
"""Called with (layer index, hidden_TD behind it) in the course of a step."""


class LayerMatrices(Enum):
    """Whether the layers' matrices have memory from the start, or only shapes until the loader fills them."""

    ALLOCATED = "allocated"
    DEFERRED = "deferred"


class Embedding(nn.Module):
    """A row of the weight per token id. With several ranks, each has some of the rows."""

    def __init__(self, weight_VD: torch.Tensor, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD, requires_grad=False)
        self._ranks = ranks

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """ids_T: any integer dtype."""
        return F.embedding(ids_T, self.weight) if self._ranks.size == 1 else self._ranks.embed(ids_T, self.weight)


class CausalLM(nn.Module):
    """The model with uninitialised weights: `load_model` fills them from a checkpoint, `random` from a seed.

    config: of this rank's part (model/parallel.py); with one rank, of the whole model.
    fingerprint: 32 bytes that identify config, dtype and weights (model/checkpoint/fingerprint.py); empty until the
      weights are set.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layer_matrices: LayerMatrices = LayerMatrices.ALLOCATED,
        ranks: Ranks = ALONE,
    ) -> None:
        """config: of the whole model. Raises ConfigError if it cannot be divided among the ranks."""
        super().__init__()
        self.config = config = config_of_rank(config, ranks.size)
        self.ranks = ranks
        self.dtype = dtype
        self.device = torch.device(device)
        self.fingerprint = b""

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def make_in_layer(*shape: int) -> torch.Tensor:
            is_deferred = layer_matrices is LayerMatrices.DEFERRED and len(shape) == 2
            return torch.empty(shape, dtype=dtype, device="meta" if is_deferred else device)

        num_rows = config.vocab_size // ranks.size
        self.embed_tokens = Embedding(make(num_rows, config.hidden_size), ranks)
        layers = (DecoderLayer(config, make_in_layer, index, ranks) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(make(config.hidden_size), config.rms_norm_eps)
        self.lm_head = Linear(make(num_rows, config.hidden_size))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = Rope(config, dtype, self.device)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "CausalLM":
        """Weights drawn from a seed (`fill_random`), for tests, benchmarks and examples without a checkpoint. The same
        seed gives the same fp32 values before they are rounded to the dtype."""
        model = cls(config, dtype=dtype, device=device)
        fill_random(model, seed=seed)
        return model

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, typed."""
        return [cast(DecoderLayer, layer) for layer in self.layers]

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv: KvPool,
        inputs: AttentionInputs,
        backend: AttentionBackend,
        wanted_S: torch.Tensor | None = None,
        take: TakeHidden | None = None,
    ) -> torch.Tensor:
        """One step: prefill chunks and decodes in one batch, as `inputs` lays them out.

        ids_T, positions_T: any integer dtype. Writes keys and values of all tokens with a slot into `kv`. Returns
        hidden_TD after the final norm, in the model's dtype. With wanted_S (int64), only those rows, and the last layer
        computes only keys and values for the others. take: called with the hidden states after every layer; after the
        last one, of the same rows.
        """
        angles = self.rope.angles(positions_T)
        ops = PagedOps(angles=angles, kv=kv, inputs=inputs, backend=backend, ranks=self.ranks)
        hidden_TD = self.embed_tokens(ids_T)
        for index, layer in enumerate(self.layers):
            hidden_TD = layer(hidden_TD, ops, wanted_S if index == len(self.layers) - 1 else None)
            if take is not None:
                take(index, hidden_TD)
        return self.norm(hidden_TD)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """hidden_SD: rows returned by `forward`. Returns float32 logits_SV."""
        logits_SV = self.lm_head.forward_float32(hidden_SD)
        return logits_SV if self.ranks.size == 1 else self.ranks.concatenate(logits_SV)

    def set_addend(self, path: str, addend: Addend | None) -> None:
        """Add something to every product of the linear at this path ("layers.3.mlp.down_proj"); None: nothing. With
        several ranks, each adds what belongs to its part. Raises AttributeError."""
        linear = self.get_submodule(path)
        if not isinstance(linear, Linear):
            raise AttributeError(f"{path} is a {type(linear).__name__}, not a Linear")
        linear.addend = addend
        for layer in self.decoder_layers:
            layer.fuse()

    def pack_weights(self, wanted: WeightFormat = WeightFormat.BF16) -> None:
        """Convert every matrix to the layout that is fastest on its device. Call once, after loading; the weights
        cannot be read afterwards. Raises model.layers.linear.FormatUnavailable."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(wanted)
        for layer in self.decoder_layers:
            layer.fuse()


VECTOR_DEVIATION = 0.1
"""Of the biases and norm weights that `fill_random` draws."""


def fill_random(model: CausalLM, *, seed: int) -> None:
    """Matrices from N(0, 1 / columns), so that activations stay near 1 and attention is not flat whatever the shape;
    biases from N(0, 0.1²) and norm weights from N(1, 0.1²), so that a test notices one that is left out. Drawn in fp32
    on the CPU, in the order of `named_parameters`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        deviation = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else VECTOR_DEVIATION
        values = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
        if name.endswith("norm.weight"):
            values += 1.0
        parameter.data.copy_(values)
    model.fingerprint = fingerprint(model)
