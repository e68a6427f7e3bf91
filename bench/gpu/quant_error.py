"""What fp8 weights and an fp8 cache cost in exactness as a GPU's kernels compute them, against the same checkpoint in
float32 on the CPU.

    python -m bench.gpu.quant_error [--model folio-chat] [--text FILE …] [--max-tokens 16384] [--json FILE]

The texts are those of bench/cpu/quant_error.py, whose emulation should find nearly the same. Each piece is a prompt, so
that its products take the way of many tokens; "by single tokens" feeds it token by token, through the kernels of decode
steps. Prints a table.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.cpu.quant_error import PIECE_TOKENS, pieces, table
from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.gpu.models import WEIGHTS
from bench.gpu.quant import WAYS
from octavo.model import KvPool, load_model, resolve_checkpoint
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.prefill import list_tiles
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from octavo.model.verify.rounding_error import LogitSums, RoundingError

BLOCK_SIZE = 16
MEASURED = ("bf16", "fp8 weights", "fp8 cache", "fp8 weights and cache")


class Steps:
    """One row's steps over a pool of its own, as a worker makes them."""

    def __init__(self, folder: Path, way: str, *, max_tokens: int) -> None:
        weights, kv_dtype = WAYS[way]
        model = load_model(folder, dtype=torch.bfloat16, device="cuda")
        if kv_dtype is FP8:
            fold_cache_scales(model)
        taken = GpuWeights.take(model, max_positions=max_tokens + BLOCK_SIZE, weight_format=WEIGHTS[weights])
        width = -(-max_tokens // BLOCK_SIZE)
        self._state = RowState(num_slots=1, table_width=width, scratch_block=width, device=torch.device("cuda"))
        kv = KvPool(model.config, width + 1, BLOCK_SIZE, kv_dtype, "cuda")
        self._decode = DecodeStep(taken, self._state, kv, max_batch=1, vocab_size=model.config.vocab_size)
        self._mixed = MixedStep(self._decode, max_tokens=max_tokens)
        self._state.table_RM[0] = torch.randperm(width, device="cuda").int()

    def logits_of_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, V] on the CPU, all tokens in one step."""
        T = len(ids)
        tokens_T = torch.arange(T, dtype=torch.int32, device="cuda")
        none_T = torch.zeros(0, dtype=torch.int32, device="cuda")
        inputs = MixedInputs(
            num_decodes=0, ids_T=torch.tensor(ids, dtype=torch.int32, device="cuda"), row_T=torch.zeros_like(tokens_T),
            position_T=tokens_T, tiles_W4=torch.from_numpy(list_tiles([(0, 0, 0, T)])).cuda(), last_S=none_T,
            rows_S=none_T, ended_E=none_T, position_E=none_T,
        )  # fmt: skip
        self._mixed.forward(inputs)
        return self._decode.project(self._mixed.hidden(slice(0, T))).float().cpu()

    def logits_by_tokens(self, ids: Sequence[int]) -> torch.Tensor:
        """The same by a decode step for each token."""
        rows = []
        for position, token in enumerate(ids):
            self._state.position_R[0], self._state.last_token_R[0], self._decode.rows_B[0] = position, token, 0
            self._decode.run(1)
            rows.append(self._decode.logits_BV[:1].float())
        return torch.cat(rows).cpu()


def measure(folder: Path, texts: Sequence[Sequence[int]]) -> dict[str, RoundingError]:
    """A row for each way, and for the last one by single tokens, over the first texts only."""
    before, backend = load_model(folder, dtype=torch.float32), get_backend("sdpa")
    expected = [paged_logits(before, backend, ids, [len(ids)]) for ids in texts]
    rows: dict[str, RoundingError] = {}
    for way in MEASURED:
        steps = Steps(folder, way, max_tokens=max(map(len, texts)))
        sums = LogitSums()
        for ids, expected_TV in zip(texts, expected, strict=True):
            sums.add(steps.logits_of_prompt(ids), expected_TV, torch.tensor(ids))
        rows[way] = sums.error()
        if way in ("bf16", MEASURED[-1]):
            sums = LogitSums()
            for ids, expected_TV in zip(texts[:4], expected, strict=False):
                sums.add(steps.logits_by_tokens(ids), expected_TV, torch.tensor(ids))
            rows[f"{way}, by single tokens"] = sums.error()
    return rows


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="folio-chat")
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    folder = resolve_checkpoint(arguments.model)
    texts = pieces(folder, arguments.text, arguments.max_tokens)
    with torch.inference_mode():
        rows = measure(folder, texts)
    print(f"{torch.cuda.get_device_name()}, {sum(map(len, texts))} tokens in pieces of at most {PIECE_TOKENS}\n")
    print(table(rows))
    write_json(arguments.json, {name: asdict(row) for name, row in rows.items()})


if __name__ == "__main__":
    main()
