"""Packs quantised matrices in the obvious way, bit by bit, and writes tiny checkpoints in the layouts of Qwen's
published GPTQ and AWQ checkpoints. Shares no code with model/quantization.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.model.checkpoints import write_tiny_checkpoint

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)

# As in Qwen2.5-0.5B-Instruct-GPTQ-Int4, -GPTQ-Int8 and -AWQ.
GPTQ_CONFIG = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
AWQ_CONFIG = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip


class RandomMatrix:
    """Random codes, zero points and scales, and the weights that they represent: weight_OI, float32."""

    def __init__(
        self, rng: np.random.Generator, O: int, I: int, *, bits: int, group_size: int, permuted: bool = False
    ) -> None:
        self.bits, G = bits, I // group_size
        self.code_IO = rng.integers(0, 2**bits, (I, O))
        self.zero_GO = rng.integers(1, 2**bits, (G, O))
        self.scale_GO = (rng.random((G, O)) * 0.01 + 0.005).astype(np.float16)
        self.group_I = np.arange(I) // group_size
        if permuted:
            self.group_I = rng.permutation(self.group_I)
        scale_IO, zero_IO = self.scale_GO[self.group_I].astype(np.float32), self.zero_GO[self.group_I]
        self.weight_OI = torch.from_numpy(((self.code_IO - zero_IO).astype(np.float32) * scale_IO).T.copy())

    def gptq(self, *, zero_offset: int = 1) -> dict[str, torch.Tensor]:
        """The four tensors of AutoGPTQ's layout; zero_offset 0: the second version of that format."""
        return {
            "qweight": words_along_rows(self.code_IO, self.bits),
            "qzeros": words_along_rows((self.zero_GO - zero_offset).T, self.bits).T.contiguous(),
            "scales": torch.from_numpy(self.scale_GO),
            "g_idx": torch.from_numpy(self.group_I.astype(np.int32)),
        }

    def awq(self) -> dict[str, torch.Tensor]:
        """The three tensors of AutoAWQ's GEMM layout. Groups must be in order."""
        return {
            "qweight": awq_words(self.code_IO),
            "qzeros": awq_words(self.zero_GO),
            "scales": torch.from_numpy(self.scale_GO),
        }


def words_along_rows(values_RC: np.ndarray, bits: int) -> torch.Tensor:
    """int32 [R * bits / 32, C]: neighbouring rows in a word, the first in the lowest bits."""
    R, C = values_RC.shape
    per_word = 32 // bits
    words = np.zeros((R // per_word, C), np.uint32)
    for row in range(R):
        for column in range(C):
            words[row // per_word, column] |= np.uint32(int(values_RC[row, column]) << (bits * (row % per_word)))
    return torch.from_numpy(words.view(np.int32))


def awq_words(values_RC: np.ndarray) -> torch.Tensor:
    """int32 [R, C / 8]: eight neighbouring columns in a word, in AWQ's order."""
    R, C = values_RC.shape
    words = np.zeros((R, C // 8), np.uint32)
    for row in range(R):
        for word in range(C // 8):
            for place in range(8):
                value = int(values_RC[row, word * 8 + AWQ_PLACES[place]])
                words[row, word] |= np.uint32(value << (4 * place))
    return torch.from_numpy(words.view(np.int32))


def write_packed_checkpoint(
    folder: Path,
    quantization: dict[str, object],
    *,
    permuted: bool = False,
    plain: tuple[str, ...] = (),
    seed: int = 0,
    **changes: object,
) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint with packed matrices (except those whose names contain an entry of `plain`). Returns the
    float32 tensors that a plain checkpoint of the same model would hold."""
    write_tiny_checkpoint(folder, seed=seed, torch_dtype="float16", quantization_config=quantization, **changes)
    rng = np.random.default_rng(seed)
    tensors = load_file(folder / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    bits, size = int(str(quantization["bits"])), int(str(quantization["group_size"]))
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "layers" not in name or any(part in name for part in plain):
            packed[name] = tensor.half()
            tensors[name] = tensor.half().float()
            continue
        O, I = tensor.shape
        matrix = RandomMatrix(rng, O, I, bits=bits, group_size=I if size == -1 else size, permuted=permuted)
        tensors[name] = matrix.weight_OI
        offset = 0 if "gptq_v2" in (quantization.get("checkpoint_format"), quantization.get("format")) else 1
        parts = matrix.awq() if quantization["quant_method"] == "awq" else matrix.gptq(zero_offset=offset)
        packed |= {f"{module}.{key}": value for key, value in parts.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def change_config(folder: Path, **changes: object) -> None:
    """Replace fields of quantization_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
