"""The random checkpoints that speed is measured on are what the service loads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import random_checkpoint
from bench.random_checkpoint import tensor_shapes, write_checkpoint
from bench.shapes import SHAPES
from octavo.gateway.text.model_text import ModelText
from octavo.model import load_model

NUM_PARAMETERS = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512}


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_checkpoint_loads_and_is_the_same_for_the_same_seed(tmp_path: Path, tied: bool) -> None:
    shape = replace(SHAPES["tiny"], tied=tied)
    first = load_model(write_checkpoint(tmp_path / "a", shape, seed=3)).state_dict()
    second = load_model(write_checkpoint(tmp_path / "b", shape, seed=3)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.std() > 0.001 for tensor in first.values())


def test_large_ones_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "_SHARD_BYTES", 600_000)
    folder = write_checkpoint(tmp_path, SHAPES["tiny"])
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    load_model(folder)


def test_its_tokenizer_has_the_ids_that_load_generators_send(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, SHAPES["tiny"])
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    text = ModelText(files, num_ids=SHAPES["tiny"].num_ids)
    assert len(text.decode_all([10_001, 10_002])) > 2
    assert text.decode_all(text.encode("Hé!", max_bytes=99).ids_T.tolist()) == "Hé!"


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    sizes = [torch.Size(size).numel() for _, size in tensor_shapes(SHAPES[name])]
    assert sum(sizes) == NUM_PARAMETERS[name]
