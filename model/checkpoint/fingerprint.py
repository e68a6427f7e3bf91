"""A short name for "these weights, computed this way": the root of prefix hashes, and what workers register with.

Two models whose keys and values may not be mixed must have different fingerprints. Hashing 144 GB at every start would
take a minute, so it is a sample: the config, the dtype, and of every tensor its name, its shape and 64 elements spread
evenly from the first to the last (of tensors of up to 64 Ki elements: all). A fine-tune changes almost every element of
the matrices that it touches and is seen; one changed weight in a large matrix may not be: this is no checksum against
tampering.

Must not know: files. It is taken from the loaded tensors, so that it does not depend on how a checkpoint is cut into
shards.
"""

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from octavo.model.layers.linear import Linear
from octavo.model.quantization.grouped import GroupedWeight

if TYPE_CHECKING:
    from octavo.model.causal_lm import CausalLM

NUM_SAMPLES = 64
WHOLE_BELOW = 65_536
DIGEST_BYTES = 32


def fingerprint(model: "CausalLM") -> bytes:
    """32 bytes (BLAKE2b). Compute it before the weights are packed. With several ranks, of this rank's part."""
    config = asdict(model.config) | {"dtype": None, "eos_token_ids": None}  # which say nothing about keys and values
    del config["family"]  # the names of the tensors tell families apart
    if config["quantization"] is None:
        del config["quantization"]
    else:
        del config["quantization"]["is_reordered"]  # as g_idx has it
    digest = hashlib.blake2b(repr((sorted(config.items()), str(model.dtype))).encode(), digest_size=DIGEST_BYTES)
    if model.ranks.size > 1:
        digest.update(f"rank {model.ranks.rank} of {model.ranks.size}".encode())
    for name, tensor in sorted((*model.named_parameters(), *quantized_tensors(model)), key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample_bytes(tensor.data))
    return digest.digest()


def quantized_tensors(model: "CausalLM") -> list[tuple[str, torch.Tensor]]:
    """The tensors of matrices that were loaded in fewer bits; their biases are parameters."""
    return [
        (f"{name}.{part}", tensor)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and isinstance(module.quantized, GroupedWeight)
        for part, tensor in module.quantized.named_tensors()
        if part != "bias"
    ]


def sample_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of the sampled elements."""
    flat = tensor.reshape(-1)
    if flat.numel() > WHOLE_BELOW:
        flat = flat[torch.linspace(0, flat.numel() - 1, NUM_SAMPLES, dtype=torch.float64, device=flat.device).long()]
    return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()
