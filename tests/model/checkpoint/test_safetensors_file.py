"""A safetensors file is read right or refused with its name, and the tensor's where there is one; nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from octavo.model.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsFile
from octavo.model.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c.weight": torch.arange(6, dtype=torch.float16).reshape(2, 3),
}
GOOD = save(TENSORS, metadata={"format": "pt"})
HEADER_END = 8 + int.from_bytes(GOOD[:8], "little")


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with SafetensorsFile(path) as file:
        found = {}
        for name, entry in file.entries.items():
            if entry.dtype in TORCH_DTYPES:
                found[name] = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
                file.read(name, found[name])
        return found


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """GOOD with a changed header."""
    header = json.loads(GOOD[8:HEADER_END])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + GOOD[HEADER_END:]


def test_every_tensor_is_read_bit_by_bit(tmp_path: Path) -> None:
    found = read_all(write(tmp_path / "model.safetensors", GOOD))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)


def test_a_tensor_is_converted_to_the_dtype_of_its_destination(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path / "model.safetensors", GOOD)) as file:
        destination = torch.empty(8, 3, dtype=torch.bfloat16)[::4]  # not contiguous either
        file.read("c.weight", destination)
    assert torch.equal(destination, TENSORS["c.weight"].bfloat16())


def test_a_pointer_of_git_lfs_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n")
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: .*`git lfs pull`$"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_file_truncated_anywhere_is_refused_by_name(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: .*truncated") as caught:
        read_all(write(tmp_path / "model.safetensors", GOOD[:length]))
    if length > HEADER_END:
        assert any(name in str(caught.value) for name in TENSORS)


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused(length: int, tmp_path: Path) -> None:
    content = length.to_bytes(8, "little") + GOOD[8:]
    with pytest.raises(CheckpointError, match=f"^model.safetensors: header length {length} is not between"):
        read_all(write(tmp_path / "model.safetensors", content))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00\x00", b"[" * 90_000, b'{"a":1,"a":1}', b'{"x":' * 50_000]
)
def test_a_header_that_is_no_json_object_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: .*header"):
        read_all(write(tmp_path / "model.safetensors", len(text).to_bytes(8, "little") + text))


def shift(name: str, start: int, end: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [offsets[0] + start, offsets[1] + end]

    return change


def put(name: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update({key: value})


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a negative offset": (put("a.weight", "data_offsets", [-48, 0]), "a.weight: data_offsets"),
    "offsets backwards": (put("b.bias", "data_offsets", [60, 48]), "b.bias: data_offsets"),
    "three offsets": (put("b.bias", "data_offsets", [0, 1, 2]), "b.bias: data_offsets"),
    "offsets that are text": (put("b.bias", "data_offsets", ["0", "4"]), "b.bias: data_offsets"),
    "a boolean offset": (put("b.bias", "data_offsets", [False, True]), "b.bias: data_offsets"),
    "an offset too far": (put("c.weight", "data_offsets", [2**62, 2**62 + 12]), "c.weight: truncated"),
    "an unknown dtype": (put("c.weight", "dtype", "F31"), "c.weight: dtype 'F31' is not known"),
    "a dtype that is no text": (put("c.weight", "dtype", ["F32"]), "c.weight: dtype"),
    "a dtype of another size": (put("c.weight", "dtype", "F32"), "c.weight: F32"),
    "a shape of another size": (put("a.weight", "shape", [3, 5]), "a.weight: F32"),
    "a negative size": (put("a.weight", "shape", [-3, -4]), "a.weight: shape"),
    "a size that is no integer": (put("a.weight", "shape", [3.0, 4]), "a.weight: shape"),
    "a huge shape": (put("a.weight", "shape", [2**40, 2**40]), "a.weight: F32"),
    "too many dimensions": (put("a.weight", "shape", [1] * 9), "a.weight: shape"),
    "no shape": (lambda header: header["a.weight"].pop("shape"), "a.weight: the header does not give"),
    "a field too many": (put("a.weight", "stride", 1), "a.weight: the header does not give"),
    "an entry that is no object": (lambda header: header.update({"a.weight": 1}), "a.weight: the header does not give"),
    "a hole where a tensor was": (lambda header: header.pop("a.weight"), "belong to no tensor"),
    "a tensor twice": (lambda header: header.update(d=header["a.weight"]), "overlaps the tensor before it"),
    "a name that moves a cursor": (lambda header: header.update({"\x1b[2J": 1}), r"the header has '\x1b[2J', which"),
    "a name that no text can hold": (lambda header: header.update({"\ud800": 1}), r"the header has '\ud800', which"),
    "half an overlap": (shift("c.weight", -2, -2), "overlaps the tensor before it"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_header_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    change, reason = MALFORMED[case]
    with pytest.raises(CheckpointError) as caught:
        read_all(write(tmp_path / "model.safetensors", with_header(change)))
    assert str(caught.value).startswith("model.safetensors: ")
    assert reason in str(caught.value)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="7 bytes behind the last tensor belong to no tensor"):
        read_all(write(tmp_path / "model.safetensors", GOOD + b"trailer"))


def test_a_file_that_shrinks_while_it_is_read_is_refused_and_does_not_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", save({"w": torch.zeros(100_000)}))
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: w: the file ended while it was read"):
            file.read("w", torch.empty(100_000))


@settings(max_examples=300)
@given(position=st.integers(0, HEADER_END - 1), value=st.integers(0, 255))
def test_any_changed_byte_of_the_header_is_refused_or_read_as_safetensors_reads_it(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    content = GOOD[:position] + bytes([value]) + GOOD[position + 1 :]
    path = write(tmp_path_factory.getbasetemp() / "mutated.safetensors", content)
    try:
        found = read_all(path)
    except CheckpointError:
        return
    expected = {name: tensor for name, tensor in load(content).items() if tensor.dtype in TORCH_DTYPES.values()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_header_of_more_tensors_than_any_model_has_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(f'"t{i}":{entry}' for i in range(100_001)) + "}").encode()
    json = "octavo.model.checkpoint.safetensors_file.json"
    monkeypatch.setattr(f"{json}.loads", lambda *_a, **_k: pytest.fail("it was parsed"))
    path = write(tmp_path / "many.safetensors", len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"^many\.safetensors: the header names 100001 tensors, 100000 are"):
        read_all(path)


def test_a_name_that_is_there_twice_among_very_many_is_found_by_counting_once(tmp_path: Path) -> None:
    text = ("{" + ",".join(f'"t{i}":0' for i in range(200_000)) + ',"same":0,"same":0}').encode()
    path = write(tmp_path / "twice.safetensors", len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="'same' is there twice"):
        read_all(path)


@pytest.mark.parametrize("number", ["9" * 4000, "9" * 5000, "1e999"])
def test_numbers_that_no_file_has_are_one_short_sentence(number: str, tmp_path: Path) -> None:
    text = ('{"a":{"dtype":"F32","shape":[' + number + '],"data_offsets":[0,4]}}').encode()
    path = write(tmp_path / "huge.safetensors", len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    assert str(caught.value).startswith("huge.safetensors: ")
    assert len(str(caught.value)) < 300
