"""`octavo verify` passes what is sound in every way it is served, and goes red for mistakes that are small or hidden in
one way of serving."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401  (before what is there is frozen)
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

from octavo.cli.errors import CliError
from octavo.cli.tools.verify import Served, check_settings, compare_served, verify
from octavo.model.attention.interface import BackendName
from octavo.model.causal_lm import CausalLM
from octavo.model.checkpoint.loading import load_model
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.cpu.native import native_library
from octavo.model.errors import CheckpointError
from octavo.model.invariant import InvarianceUnavailable
from octavo.model.layers.decoder import Rope
from octavo.model.layers.linear import FormatUnavailable
from octavo.model.verify.served import MISTAKE, ServedRow
from octavo.worker.config import Deterministic
from octavo.worker.loading import loader as runner_loading
from octavo.worker.runners.torch.runner import TorchRunner
from octavo.worker.scheduler.plan import StepPlan
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import AWQ_CONFIG, write_packed_checkpoint
from tests.support.model.qwen3 import write_qwen3

HALF, WIDE = "bfloat16", "float32"
needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler here")


# Verifying collects garbage after each model: of what was there before, nothing can be.
pytestmark = pytest.mark.usefixtures("frozen_for_all")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), torch_dtype="bfloat16", intermediate_size=160)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    folder = tmp_path_factory.mktemp("yarn")
    return write_tiny_checkpoint(folder, torch_dtype="bfloat16", max_position_embeddings=64, rope_scaling=scaling)


def compare(folder: Path, **options: Any) -> list[ServedRow]:
    return compare_served(Served(model=str(folder), device="cpu", **options), folder, num_prompts=3, max_new_tokens=6)


def red(rows: list[ServedRow]) -> dict[str, set[str]]:
    """The checks that failed, by dtype."""
    found: dict[str, set[str]] = {HALF: set(), WIDE: set()}
    for row in rows:
        if not row.is_ok:
            found[row.label.rpartition(" ")[2]].add(row.check)
    return found


def plant(monkeypatch: pytest.MonkeyPatch, dtype: str, damage: Callable[[CausalLM], None]) -> None:
    """Whatever a worker loads in this dtype is damaged before it is packed."""

    def load(*arguments: Any, **options: Any) -> CausalLM:
        model = load_model(*arguments, **options)
        if str(model.dtype) == f"torch.{dtype}":
            damage(model)
        return model

    monkeypatch.setattr(runner_loading, "load_model", load)


def scale_queries(model: CausalLM, factor: float) -> None:
    """What a wrong scale of attention does: queries of another length."""
    for layer in model.decoder_layers:
        attention = layer.self_attn.qkv_proj
        queries = model.config.num_attention_heads * model.config.head_dim
        for tensor in (attention.weight.data, attention.bias.data):  # type: ignore[union-attr]
            tensor[:queries] = (tensor[:queries].float() * factor).to(tensor.dtype)


def scale_outputs(model: CausalLM, factor: float) -> None:
    for layer in model.decoder_layers:
        layer.mlp.down_proj.weight.data.mul_(factor)


def raise_epsilon(model: CausalLM) -> None:
    for module in model.modules():
        if hasattr(module, "epsilon"):
            module.epsilon = 1e-4


@pytest.mark.parametrize("options", [{"max_model_len": 2}, {"max_model_len": 3, "dtype": "float32"}])
def test_a_context_of_two_tokens_is_compared(tiny: Path, options: dict[str, Any]) -> None:
    assert red(compare(tiny, **options)) == {HALF: set(), WIDE: set()}


def test_a_context_of_one_token_leaves_nothing_to_compare(tiny: Path) -> None:
    with pytest.raises(CliError, match=f"{tiny.name} is served with 1 position"):
        compare(tiny, max_model_len=1)


def test_layers_whose_window_is_as_long_as_the_context_are_compared(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, use_sliding_window=True, sliding_window=512, max_window_layers=1)
    assert red(compare(folder)) == {HALF: set(), WIDE: set()}


def test_a_mistake_that_would_change_nothing_is_not_found_in_rounding(tmp_path: Path) -> None:
    """Where all queries are almost nothing, every key counts alike, whatever attention is scaled with."""
    folder = write_tiny_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".q_proj." in name:
            tensors[name] *= 1e-6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert red(compare(folder)) == {HALF: set(), WIDE: set()}


def test_a_long_context_of_few_keys_is_not_taken_for_a_mistake(tmp_path: Path) -> None:
    """In float32, 80,000 times the same terms: each sum is rounded to the same side."""
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 2048, "beta_fast": 2}
    heads = {"hidden_size": 90, "num_attention_heads": 15, "num_key_value_heads": 3, "num_hidden_layers": 1}
    folder = write_tiny_checkpoint(tmp_path, rope_theta=1e6, rope_scaling=yarn, max_position_embeddings=2048, **heads)
    assert red(compare(folder)) == {HALF: set(), WIDE: set()}


@pytest.mark.parametrize("changes", [{"layer_types": ["full_attention"] * 3}, {"text_config": {"a": 1}}])
def test_what_transformers_does_not_load_is_said_in_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_tiny_checkpoint(tmp_path, **changes)
    load_model(folder)
    with pytest.raises(CheckpointError, match=r"transformers cannot load it: \w+: .+"):
        compare(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"attention_backend": "reference"},
        {"kv_cache_dtype": "fp8"},
        {"max_model_len": 40},
        {"tensor_parallel_size": 2},
        pytest.param({"deterministic": Deterministic.ON}, marks=needs_compiler),
    ],
    ids=str,
)
def test_what_is_sound_is_green_in_every_way_it_is_served(tiny: Path, options: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny
    if "deterministic" in options:  # whose kernels want heads of 32
        folder = write_tiny_checkpoint(tmp_path, torch_dtype="bfloat16", num_attention_heads=2, num_key_value_heads=1)
    rows = compare(folder, **options)
    assert [row for row in rows if not row.is_ok] == []
    assert len({row.label for row in rows}) == (1 if options.get("dtype") == "float32" else 2)
    labels = [row.label for row in rows]
    assert any(label.endswith("float32") for label in labels)


def test_positions_go_to_the_end_of_the_served_context(yarn: Path, tiny: Path) -> None:
    for folder, options, last in ((yarn, {}, 511), (tiny, {}, 511), (tiny, {"max_model_len": 300}, 299)):
        modes = {row.mode for row in compare(folder, **options) if row.check == "far positions"}
        assert f"up to {last}" in modes


def test_integers_are_judged_against_the_same_integers_in_float32(tiny: Path) -> None:
    try:
        rows = compare(tiny, quantization="int8")
    except FormatUnavailable as error:
        pytest.skip(str(error))
    assert [row for row in rows if not row.is_ok] == []
    assert "int8" in rows[0].label


def test_packed_checkpoints_are_judged_against_their_own_weights(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, AWQ_CONFIG | {"group_size": 32})
    rows = compare(tmp_path)
    assert [row for row in rows if not row.is_ok] == []


@pytest.mark.parametrize(("name", "dtype"), [("folio-chat", HALF), ("tiny", HALF), ("tiny", WIDE)])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda model: scale_queries(model, 1.02), id="attention scale × 1.02"),
        pytest.param(raise_epsilon, id="eps 1e-4"),
        pytest.param(lambda model: scale_outputs(model, 1.02), id="what MLPs add × 1.02"),
    ],
)
def test_a_small_mistake_in_one_dtype_alone_is_red_there_and_only_there(
    name: str, damage: Callable[[CausalLM], None], dtype: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, dtype, damage)
    is_folio = name == "folio-chat"
    found = red(compare(resolve_checkpoint(name), max_model_len=160) if is_folio else compare(tiny))
    assert found[dtype]
    assert not found[WIDE if dtype == HALF else HALF]


def test_packed_products_that_are_half_as_large_again_are_red(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = CausalLM.pack_weights

    def pack_wrongly(model: CausalLM, *arguments: Any) -> None:
        if model.dtype == torch.bfloat16:
            for layer in model.decoder_layers:
                layer.mlp.down_proj.weight.data.mul_(1.5)
                layer.self_attn.o_proj.weight.data.mul_(1.5)
        pack(model, *arguments)

    monkeypatch.setattr(CausalLM, "pack_weights", pack_wrongly)
    found = red(compare(tiny))
    assert {"a long prompt", "decodes", "far positions"} <= found[HALF]
    assert found[WIDE] == set()


@pytest.mark.parametrize("last", [127, 400])
def test_positions_that_stop_counting_are_red_where_only_far_ones_show_it(
    yarn: Path, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    angles = Rope.angles
    monkeypatch.setattr(Rope, "angles", lambda rope, positions_T: angles(rope, positions_T.clamp(max=last)))
    rows = compare(yarn)
    assert {"far positions"} <= red(rows)[HALF] & red(rows)[WIDE]
    assert not any(row.check == "decodes" and not row.is_ok for row in rows)


def test_a_mistake_of_decodes_alone_is_red_in_decodes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = TorchRunner.launch

    def launch_late(runner: TorchRunner, plan: StepPlan) -> None:
        """Decodes are taken for tokens of the position before."""
        launch(runner, replace(plan, decode_positions_S=np.maximum(plan.decode_positions_S - 1, 0)))

    monkeypatch.setattr(TorchRunner, "launch", launch_late)
    found = red(compare(tiny))
    assert "decodes" in found[HALF] & found[WIDE]
    assert "a long prompt" not in found[HALF] | found[WIDE]


@needs_compiler
def test_deterministic_mode_that_rounds_by_the_batch_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_checkpoint(tmp_path, torch_dtype="bfloat16", num_attention_heads=2, num_key_value_heads=1)
    rows = compare(folder, deterministic=Deterministic.ON)
    same = [row for row in rows if row.check == "the same bits"]
    assert len(same) == 2
    assert all(row.is_ok and row.error == 0 and row.num_values for row in same)
    logits = CausalLM.logits
    monkeypatch.setattr(
        CausalLM,
        "logits",
        lambda model, hidden_SD: logits(model, hidden_SD * (1 + 1e-6 * (len(hidden_SD) > 1))),
    )
    assert red(compare(folder, deterministic=Deterministic.ON))[WIDE] == {"the same bits"}


def test_logits_that_are_nan_are_red(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, HALF, lambda model: model.norm.weight.data.fill_(torch.nan))
    found = red(compare(tiny))
    assert {"a long prompt", "decodes", "far positions", MISTAKE} <= found[HALF]
    assert found[WIDE] == set()


def test_a_folder_without_a_tokenizer_is_refused_as_a_worker_refuses_it(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Exception, match=r"there is no tokenizer\.json"):
        compare(folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}, {"deterministic": Deterministic.ON}],
    ids=["plain", "int8", "fp8 cache", "deterministic"],
)
@needs_compiler
def test_qwen3_passes_in_every_way_that_it_is_served(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = compare(write_qwen3(tmp_path, dtype=torch.bfloat16), **options)
    assert {row.label.rpartition(" ")[2] for row in rows} == {HALF, WIDE}
    assert not any(red(rows).values())


def test_qwen3_without_the_norm_of_its_queries_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_norm(model: CausalLM) -> None:
        for layer in model.decoder_layers:
            layer.self_attn.q_norm = None

    plant(monkeypatch, WIDE, forget_norm)
    assert red(compare(write_qwen3(tmp_path, dtype=torch.bfloat16)))[WIDE]


@pytest.mark.parametrize("can", [True, False])
def test_inputs_are_taken_to_be_rounded_where_this_cpu_rounds_them(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the limits of what is served would be those of something less exact."""
    monkeypatch.setattr("octavo.cli.tools.verify.multiplies_integers", lambda: can)
    served = Served(model="any", device="cpu", quantization="int8")
    assert served.rounded.weights == ("int8" if can else "int8-weights")
    assert replace(served, quantization="int8-weights").rounded.weights == "int8-weights"
    assert replace(served, quantization=None).rounded.weights is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 999}, "--max-model-len is 999, and .* has 512 positions"),
        ({"dtype": "int4"}, "--dtype is 'int4'"),
        ({"quantization": "int4"}, "--quantization is 'int4'"),
        ({"quantization": "fp8"}, "fp8 weights need a GPU"),
        ({"attention_backend": "flash"}, "--attention-backend is 'flash'"),
        ({"deterministic": Deterministic.ON, "dtype": "float16"}, "deterministic mode on a CPU is for"),
        ({"deterministic": Deterministic.ON, "attention_backend": "sdpa"}, "deterministic mode goes with no"),
        ({"deterministic": Deterministic.ON}, r"sizes \(64, 160, 16\) must be multiples of 32"),
        ({"quantization": "int8", "dtype": "float32"}, "need a bf16 model, and this one computes in float32"),
    ],
)
def test_settings_that_no_worker_could_have_are_told_before_anything_is_compared(
    tiny: Path, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.tools.verify.configure_logs", lambda *args: None)
    monkeypatch.setattr("octavo.cli.tools.verify.verify_checkpoint", Mock(side_effect=AssertionError("it was begun")))
    with pytest.raises((CliError, FormatUnavailable, InvarianceUnavailable), match=words):
        verify(Served(model=str(tiny), device="cpu", **options), backends=(), num_prompts=1, max_new_tokens=1)


def test_settings_that_a_worker_can_have_are_taken(tiny: Path) -> None:
    check_settings(Served(model=str(tiny), device="cpu"), ["reference", "sdpa"])
    check_settings(Served(model=str(tiny), device="cpu", dtype="bfloat16", quantization="int8", max_model_len=16))
    with pytest.raises(BackendName, match="flash"):
        check_settings(Served(model=str(tiny)), ["flash"])
