"""`octavo sizing`: the worker's own arithmetic on a shape; docs/sizing.md has what it prints."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo.cli.app import whole_app
from octavo.cli.errors import CliError
from octavo.cli.tools import sizing
from octavo.cli.tools.sizing import GIB, PUBLISHED, Asked, size
from octavo.model import CausalLM, ModelConfig, load_model
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.checkpoint.packed import Packed
from octavo.worker.loading.memory import weights_bytes
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import AWQ_CONFIG, GPTQ_CONFIG, write_packed_checkpoint

PAGE = Path(__file__).resolve().parents[3] / "docs/sizing.md"
TABLES = re.findall(r"<!-- made by: octavo (.*?) -->\n((?:\|.*\n)+)", PAGE.read_text())


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(whole_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("arguments", "table"), TABLES, ids=[arguments for arguments, _ in TABLES])
def test_a_table_of_the_page_is_what_the_command_prints(arguments: str, table: str) -> None:
    assert printed(*shlex.split(arguments)) == table


def test_the_page_has_tables() -> None:
    assert len(TABLES) >= 3


def test_streams_fill_what_weights_and_steps_leave_and_not_more() -> None:
    """By hand: 0.5B at 4,096 tokens in 16 GiB."""
    found = size("Qwen2.5-0.5B", Asked(memory_gib=(16,)))
    config = ModelConfig.from_dict(PUBLISHED["Qwen2.5-0.5B"])
    context_bytes = 256 * kv_block_bytes(config, block_size=16, dtype=torch.bfloat16)
    left = 0.9 * 16 * GIB - found.weights_bytes
    assert found.streams[16] * context_bytes < left < (found.streams[16] + 40) * context_bytes
    assert found.kv_bytes_per_token == 24 * 2 * 2 * 64 * 2


def test_more_memory_shorter_contexts_and_fewer_bits_never_fit_less() -> None:
    plain = size("Qwen2.5-7B", Asked())
    assert list(plain.streams.values()) == sorted(plain.streams.values())
    for better in (Asked(context=2048), Asked(quantization="fp8"), Asked(kv_cache_dtype="fp8")):
        more = size("Qwen2.5-7B", better).streams
        assert all(more[gib] >= plain.streams[gib] for gib in plain.streams)


def test_a_model_that_does_not_fit_has_no_streams() -> None:
    assert size("Qwen2.5-72B", Asked(memory_gib=(80,))).streams == {80: 0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shapes_are_those_that_are_published(name: str, shared: Path) -> None:
    folder = shared / "data/configs" / f"{name}-Instruct"
    if not folder.is_dir():
        pytest.skip(f"no config of {name} at hand")
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    whole = CausalLM(config, dtype=torch.bfloat16, device="meta")
    found = size(name, Asked(context=1024))
    assert found.weights_bytes == weights_bytes(whole)
    assert found.kv_bytes_per_token * 16 == kv_block_bytes(config, block_size=16, dtype=torch.bfloat16)


NUM_PARAMETERS = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.61, "14B": 14.7, "32B": 32.5, "72B": 72.7} | {
    "0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2,
}  # fmt: skip
"""In billions, as the models' cards tell them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_its_card_says(name: str) -> None:
    told = {"Qwen3-14B": 14.8, "Qwen3-32B": 32.8}.get(name) or NUM_PARAMETERS[name.split("-")[1]]
    assert size(name, Asked(context=1024)).weights_bytes / 2e9 == pytest.approx(told, rel=0.015, abs=0.02)


def test_a_checkpoint_on_this_machine_is_sized_too() -> None:
    (found,) = json.loads(printed("sizing", "folio-chat", "--context", "512", "--memory", "1", "--json"))
    assert found["model"] == "folio-chat"
    assert found["streams"]["1"] > 100


def test_a_context_that_nobody_gave_is_no_longer_than_the_models() -> None:
    unset, given = (printed("sizing", "folio-chat", "Qwen3-8B", *more) for more in ((), ("--context", "2048")))
    assert unset == given
    assert unset.startswith("streams of 2,048 tokens at once")
    assert printed("sizing", "Qwen3-8B").startswith("streams of 4,096 tokens at once")


def test_a_config_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, config_of = [], sizing._config_of
    monkeypatch.setattr(sizing, "_config_of", lambda model: read.append(model) or config_of(model))
    printed("sizing", "folio-chat", "Qwen3-8B")
    assert read == ["folio-chat", "Qwen3-8B"]


def test_a_folder_is_read_although_its_name_is_that_of_a_published_model(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "Qwen2.5-7B-Instruct")
    assert size(str(folder), Asked(context=64)).weights_bytes == weights_bytes(load_model(folder))


def test_memory_is_named_alike_whether_it_was_given_or_not_and_a_column_once() -> None:
    (unset,) = json.loads(printed("sizing", "Qwen2.5-0.5B", "--json"))
    (given,) = json.loads(printed("sizing", "Qwen2.5-0.5B", "--memory", "24", "--memory", "0.5", "--json"))
    assert list(unset["streams"]) == ["16", "24", "48", "80", "141"]
    assert given["streams"] == {"24": unset["streams"]["24"], "0.5": 0}
    twice = printed("sizing", "Qwen2.5-0.5B", "--memory", "24", "--memory", "24", "--markdown")
    assert len({line.count("|") for line in twice.splitlines()}) == 1


def test_a_context_may_be_as_long_as_yarn_extends_it(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    folder = str(write_tiny_checkpoint(tmp_path, rope_scaling=yarn))
    assert size(folder, Asked(context=2048, memory_gib=(1.0,))).streams[1.0] > 0
    with pytest.raises(CliError, match="has 2,048 positions"):
        size(folder, Asked(context=2049, memory_gib=(1.0,)))


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (GPTQ_CONFIG | {"group_size": 32}, ()),
        (GPTQ_CONFIG | {"group_size": 32, "bits": 8, "desc_act": True}, ()),
        (GPTQ_CONFIG | {"group_size": -1}, ()),
        (AWQ_CONFIG | {"group_size": 32, "modules_to_not_convert": ["k_proj"]}, ("k_proj",)),
    ],
)
def test_a_packed_checkpoint_takes_what_a_gpu_keeps_of_it(
    config: dict[str, object], plain: tuple[str, ...], tmp_path: Path
) -> None:
    write_packed_checkpoint(tmp_path, config, plain=plain)
    model = load_model(tmp_path, packed=Packed.KEPT)
    taken = weights_bytes(model)
    if config.get("desc_act"):  # two layers of four matrices, whose inputs have the same order as long as all of one do
        taken += 2 * 4 * (3 * 64 + 128)
    assert size(str(tmp_path), Asked(context=64)).weights_bytes == taken
    assert taken < weights_bytes(CausalLM(model.config, dtype=model.dtype, device="meta"))
    with pytest.raises(CliError, match="is quantised already"):
        size(str(tmp_path), Asked(context=64, quantization="int8"))


def test_a_checkpoint_is_sized_in_the_type_that_it_is_served_in(tmp_path: Path) -> None:
    whole, half = (
        size(str(write_tiny_checkpoint(tmp_path / dtype, torch_dtype=dtype)), Asked(context=64))
        for dtype in ("float32", "bfloat16")
    )
    assert whole.weights_bytes == weights_bytes(load_model(tmp_path / "float32"))
    assert (whole.weights_bytes, whole.kv_bytes_per_token) == (2 * half.weights_bytes, 2 * half.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["Qwen2.5-7"], "did you mean Qwen2.5-7B?"),
        (["/nothing/here"], "give a folder"),
        (["Qwen3-8B", "--context", "99999"], "--context is 99,999, and Qwen3-8B has 40,960 positions"),
        (["Qwen3-8B", "--quantization", "int4"], "give one of none, int8, fp8"),
        (["Qwen3-8B", "--kv-cache-dtype", "int8"], "give one of auto, fp8"),
        (["Qwen3-8B", "--markdown", "--json"], "--markdown and --json are given"),
    ],
)
def test_what_cannot_be_sized_is_refused_by_name(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(whole_app(), ["sizing", *arguments])
    assert result.exit_code != 0
    told = result.exception
    assert complaint in f"{getattr(told, 'what', '')} {getattr(told, 'numbers', '')} {getattr(told, 'change', '')}"
