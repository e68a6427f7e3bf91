"""`octavo verify` on a CUDA device: the kernels as they serve, in every format, and mistakes in them are red."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.cli.tools.verify import Served, compare_served
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.gpu import weights as gpu_weights
from octavo.model.verify.served import ServedRow
from octavo.worker.config import Deterministic
from octavo.worker.loading.weight_format import FP8_CAPABILITY
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import AWQ_CONFIG, write_packed_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="no e4m3 on this GPU")


def compare(name: str | Path, **options: Any) -> list[ServedRow]:
    folder = resolve_checkpoint(str(name))
    served = Served(model=str(folder), device="cuda", **options)
    return compare_served(served, folder, num_prompts=4, max_new_tokens=8)


WAYS_TO_SERVE = [
    {},
    {"dtype": "float32"},
    {"attention_backend": "sdpa"},
    {"deterministic": Deterministic.ON},
    {"quantization": "int8"},
    pytest.param({"quantization": "fp8"}, marks=needs_fp8),
    pytest.param({"kv_cache_dtype": "fp8"}, marks=needs_fp8),
]


def told(rows: list[ServedRow]) -> list[str]:
    """What failed, with its figures."""
    return [
        f"{row.label} {row.check} {row.mode}: {row.error:.3g} (limit {row.limit:.3g}), gap {row.gap:.3g}"
        for row in rows
        if not row.is_ok
    ]


@pytest.mark.parametrize("options", WAYS_TO_SERVE, ids=str)
def test_what_a_gpu_serves_is_green_in_every_format(options: dict[str, Any]) -> None:
    rows = compare("folio-chat", **options)
    assert told(rows) == []
    assert all(row.label.startswith("cuda") for row in rows)


def test_packed_checkpoints_are_green(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, AWQ_CONFIG, hidden_size=256, intermediate_size=512, head_dim=64)
    assert told(compare(tmp_path)) == []


def test_a_table_of_angles_that_stops_is_red_at_far_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    write_tiny_checkpoint(tmp_path, torch_dtype="bfloat16", max_position_embeddings=64, rope_scaling=scaling)
    assert told(compare(tmp_path)) == []
    tables = gpu_weights.rope_tables

    def stopped(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat([table[:128], table[127:128].expand(len(table) - 128, -1)]) for table in tables(*arguments)
        )

    monkeypatch.setattr(gpu_weights, "rope_tables", stopped)
    assert {row.check for row in compare(tmp_path) if not row.is_ok} >= {"far positions"}


def test_matrices_that_are_a_little_too_large_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    take = gpu_weights.fold_layer

    def too_large(layer: Any) -> Any:
        layer.mlp.down_proj.weight.data.mul_(1.02)
        return take(layer)

    monkeypatch.setattr(gpu_weights, "fold_layer", too_large)
    rows = compare("folio-chat")
    assert {row.label.rpartition(" ")[2] for row in rows if not row.is_ok} == {"bfloat16", "float32"}
