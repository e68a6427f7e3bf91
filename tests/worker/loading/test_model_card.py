"""The model card: what a checkpoint folder says about its model, and how it is refused when it says nonsense."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.validation.generate import check_generate
from octavo.model import ModelConfig
from octavo.v1 import inference_pb2
from octavo.wire.bundle import bundle_digest, check_bundle
from octavo.worker.config import RunnerKind, WorkerConfig
from octavo.worker.loading.loaded import load_oracle, served_name
from octavo.worker.loading.model_card import (
    CardError,
    context_len,
    default_sampling,
    describe,
    end_token_ids,
    tokenizer_vocab_size,
)
from tests.support.model.checkpoints import tiny_config, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder without weights."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def as_texts(merges: list[Any]) -> list[str]:
    """Merges as older files have them: "a b", not ["a", "b"]."""
    return [each if isinstance(each, str) else " ".join(each) for each in merges]


def test_the_card_has_what_the_files_say(folder: Path) -> None:
    described = describe(folder)
    files = {name: (folder / name).read_bytes() for name in described.files}
    assert set(files) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    card = described.card(name="tiny", fingerprint="f", dtype="float32", max_model_len=100)
    assert (card.name, card.architecture, card.max_model_len) == ("tiny", "Qwen2ForCausalLM", 100)
    assert card.vocab_size == 320
    assert card.default_sampling == {"temperature": 0.7, "top_k": 20.0}
    check_bundle(files, card.tokenizer_digest)


def test_the_real_qwen_has_fewer_ids_than_rows_and_two_ends(shared: Path, tmp_path: Path) -> None:
    for source in (shared / "data/tokenizer", shared / "data/configs/Qwen2.5-0.5B-Instruct"):
        for file in source.iterdir():  # without the modes: the folder may be another's, and read-only
            shutil.copyfile(file, tmp_path / file.name)
    described = describe(tmp_path)
    assert described.vocab_size == 151_665
    assert described.eos_token_ids == (151_645, 151_643)
    assert described.max_model_len == 32_768
    assert described.default_sampling == {"temperature": 0.7, "top_k": 20.0, "top_p": 0.8, "repetition_penalty": 1.1}
    assert "vocab.json" not in described.files
    assert described.notes == ()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"max_position_embeddings": 0}'),
        ("config.json", '{"max_position_embeddings": "many"}'),
        ("config.json", json.dumps(tiny_config(vocab_size=319))),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"vocab": {}}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        ("tokenizer.json", '{"model": {"vocab": [1]}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1}}, "added_tokens": [{}]}'),
        ("generation_config.json", '{"eos_token_id": 320}'),
        ("generation_config.json", '{"eos_token_id": [1, -1]}'),
        ("generation_config.json", '{"eos_token_id": ["a"]}'),
    ],
)
def test_files_that_describe_no_model_are_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CardError):
        describe(folder)


@pytest.mark.parametrize("name", ["config", "tokenizer", "generation_config", "tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("content", [b'{"a": "\xfc"}', b"{", b"\xef\xbb\xbf{}", b'{"a": NaN}', b"[]"])
def test_a_file_that_is_no_json_object_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / f"{name}.json").write_bytes(content)
    with pytest.raises(CardError, match=rf"{name}\.json"):
        describe(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre_tokenizer": {"type": "OfTheFuture"}}, "any variant of untagged enum PreTokenizer"),
        ({"normalizer": []}, "any variant of untagged enum Normalizer"),
        ({"version": "9.0"}, "Unknown tokenizer version '9.0'"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Cannot parse precompiled_charsmap"),
    ],
)
def test_a_tokenizer_that_gateways_could_not_load_is_refused_with_its_file_and_the_reason(
    folder: Path, change: dict[str, object], words: str
) -> None:
    """They would serve token ids alone, with a line in the log. What they can load and not use is another thing."""
    rewrite(folder / "tokenizer.json", **change)
    with pytest.raises(CardError) as caught:
        describe(folder)
    assert str(caught.value).startswith(f"{folder}/tokenizer.json cannot be loaded by tokenizers ")
    assert words in str(caught.value)
    assert " column " not in str(caught.value)


@pytest.mark.parametrize("as_pairs", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merges": ["q q"]}, "Token `qq` out of vocabulary"),
        ({"merges": ["zz q"]}, "Token `zz` out of vocabulary"),
        ({"merges": ["t h e"]}, "any variant of untagged enum MergeType|invalid at line"),
        ({"vocab": {"zz": -1}}, "integer `-1`, expected u32"),
        ({"vocab": {"zz": 1.5}}, "floating point `1.5`, expected u32"),
    ],
)
def test_a_vocabulary_and_merges_that_do_not_fit_together_are_refused_too(
    folder: Path, as_pairs: bool, changes: dict[str, Any], words: str
) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [*as_texts(model["merges"]), *changes.get("merges", ())]
    model["merges"] = [each.split(" ") for each in merges] if as_pairs else merges
    model["vocab"] |= changes.get("vocab", {})
    rewrite(folder / "tokenizer.json", model=model)
    with pytest.raises(CardError, match=words) as caught:
        describe(folder)
    assert str(caught.value).startswith(f"{folder}/tokenizer.json cannot be loaded by tokenizers ")


def test_the_library_does_not_see_merges_with_a_prefix(folder: Path) -> None:
    """Cutting them by its length, it panics, or ends the process. Gateways do not load such a tokenizer."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model |= {"continuing_subword_prefix": "##", "merges": ["zz q"]}
    rewrite(folder / "tokenizer.json", model=model)
    assert describe(folder).vocab_size == 320


@pytest.mark.parametrize("as_pairs", [False, True])
def test_merges_of_either_form_are_taken(folder: Path, as_pairs: bool) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = as_texts(model["merges"])
    model["merges"] = [each.split(" ") for each in merges] if as_pairs else ["#version: 0.2", *merges]
    rewrite(folder / "tokenizer.json", model=model)
    assert describe(folder).vocab_size == 320


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CardError, match=name):
        describe(folder)


def test_a_vocab_size_in_quotation_marks_is_told_with_them(folder: Path) -> None:
    rewrite(folder / "config.json", vocab_size="384")
    with pytest.raises(CardError, match=r"has 320 ids, config\.json a vocab_size of '384'"):
        describe(folder)


def test_the_highest_id_counts_wherever_it_stands() -> None:
    def size(vocab: dict[str, int], *added: int) -> int:
        tokens = [{"id": each} for each in added]
        return tokenizer_vocab_size(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}).encode())

    assert [size({"a": 0, "b": 9}), size({"a": 0}, 11, 10), size({"a": 12}, 3)] == [10, 12, 13]


def test_end_tokens_come_from_the_generation_config_first() -> None:
    both = ({"eos_token_id": 1}, {"eos_token_id": [2, 3, 2]})
    assert end_token_ids(*both, vocab_size=9) == (2, 3)
    assert end_token_ids({"eos_token_id": 1}, {}, vocab_size=9) == (1,)
    assert end_token_ids({}, {}, vocab_size=9) == ()


def test_the_tokenizers_own_end_token_ends_an_output_too(folder: Path) -> None:
    """Of a chat model whose config.json and generation_config.json are still those of the base model."""
    added = {
        each["content"]: each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    end, base_end = added["<|im_end|>"], added["<|endoftext|>"]
    for token in ("<|im_end|>", {"content": "<|im_end|>", "special": True}):
        rewrite(folder / "tokenizer_config.json", eos_token=token)
        rewrite(folder / "generation_config.json", eos_token_id=base_end)
        assert describe(folder).eos_token_ids == (base_end, end)
        rewrite(folder / "generation_config.json", eos_token_id=[end, base_end])
        assert describe(folder).eos_token_ids == (end, base_end), "as most checkpoints have it"
    for none in (None, "<|nobody knows|>", 5):
        rewrite(folder / "tokenizer_config.json", eos_token=none)
        assert describe(folder).eos_token_ids == (end, base_end)
    (folder / "tokenizer_config.json").unlink()
    assert describe(folder).eos_token_ids == (end, base_end)


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
def test_an_older_checkpoints_map_of_special_tokens_names_the_end(folder: Path, decoder: dict[str, object]) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>", "lstrip": false}}')
    assert describe(folder).eos_token_ids == (() if decoder else (319,))
    (folder / "special_tokens_map.json").write_text("[]")
    with pytest.raises(CardError, match=r"special_tokens_map\.json"):
        describe(folder)


def test_the_end_is_config_jsons_where_generation_config_has_null() -> None:
    assert end_token_ids({"eos_token_id": 1}, {"eos_token_id": None}, vocab_size=9) == (1,)
    assert end_token_ids({"eos_token_id": 1}, {"eos_token_id": []}, vocab_size=9) == ()


@pytest.mark.parametrize("value", [True, [9], -1, "1"])
def test_an_end_that_is_no_id_is_refused_with_its_file(value: object) -> None:
    for file, both in {
        "config.json": ({"eos_token_id": value}, {}),
        "generation_config.json": ({"eos_token_id": 1}, {"eos_token_id": value}),
    }.items():
        with pytest.raises(CardError, match=f"^{file}: eos_token_id "):
            end_token_ids(*both, vocab_size=9)


def test_the_operator_is_told_of_tokens_that_end_nothing_and_of_tokens_that_are_text(folder: Path) -> None:
    assert describe(folder).notes == ()
    (folder / "generation_config.json").unlink()
    stranger = {"384": {"content": "<|x|>", "special": True}, "319": {"content": "<|im_end|>"}}
    changes = {"added_tokens_decoder": stranger, "additional_special_tokens": ["<|im_start|>", "<|y|>", "<|x|>"]}
    rewrite(folder / "tokenizer_config.json", eos_token=None, **changes)
    strangers, no_end = describe(folder).notes
    assert "added tokens that tokenizer.json has not ('<|x|>', '<|y|>')" in strangers
    assert no_end.startswith("no file names an end token")
    (folder / "additional_chat_templates").mkdir()
    assert describe(folder).notes[2].startswith("additional_chat_templates is not read")


@pytest.mark.parametrize("changes", [{}, {"max_position_embeddings": None}])
def test_a_config_without_positions_has_as_many_as_the_model_reads(changes: dict[str, Any]) -> None:
    config = {name: value for name, value in tiny_config().items() if name != "max_position_embeddings"} | changes
    assert context_len(config) == ModelConfig.from_dict(config).max_position_embeddings == 32_768


def test_yarn_extends_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert context_len({"max_position_embeddings": 32_768, "rope_scaling": yarn}) == 131_072
    assert context_len({"max_position_embeddings": 131_072, "rope_scaling": yarn}) == 131_072
    assert context_len({"max_position_embeddings": 32_768, "rope_scaling": None}) == 32_768
    apart = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32_768}
    assert context_len({"max_position_embeddings": 64, **apart}) == 131_072
    assert context_len({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}) == 512
    no_type = {"max_position_embeddings": 32_768, "rope_scaling": yarn | {"rope_type": None}}
    assert context_len(no_type) == ModelConfig.from_dict(tiny_config(**no_type)).context_len == 131_072


def test_without_sampling_the_default_is_greedy() -> None:
    assert default_sampling({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    assert default_sampling({"top_p": None}) == {}


@pytest.mark.parametrize(
    ("recommended", "becomes"),
    [
        ({"top_k": -1, "temperature": 0}, {"top_k": 0.0, "temperature": 0.0}),
        ({"top_k": 20.0, "min_p": 0.05}, {"top_k": 20.0, "min_p": 0.05}),
        ({"top_p": 1, "repetition_penalty": 100}, {"top_p": 1.0, "repetition_penalty": 100.0}),
        ({"repetition_penalty": 2e-6}, {"repetition_penalty": 2e-6}),
    ],
)
def test_what_a_checkpoint_recommends_is_what_a_request_could_ask_for(
    recommended: dict[str, float], becomes: dict[str, float]
) -> None:
    defaults = default_sampling(recommended)
    assert defaults == becomes
    sampling = inference_pb2.SamplingParams(**defaults | {"top_k": int(defaults.get("top_k", 0))})
    check_generate(inference_pb2.GenerateRequest(text="x", sampling=sampling))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.1), ("temperature", 100.5), ("top_k", -2), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.01)),
        *(("min_p", -0.1), ("repetition_penalty", 1e-6), ("repetition_penalty", True), ("min_p", "small")),
    ],
)
def test_a_recommendation_that_no_request_could_ask_for_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(CardError, match=rf"generation_config.json: {name} is .* should be a "):
        default_sampling({name: value})


def oracle(model: str, **changes: object) -> WorkerConfig:
    return WorkerConfig(model=model, gateway_endpoints=(), runner=RunnerKind.ORACLE, **changes)  # type: ignore[arg-type]


def ignore(stage: str, done: int | None, total: int | None) -> None:
    """No bar."""


def test_the_oracle_takes_the_tokenizer_of_a_checkpoint_folder(folder: Path) -> None:
    loaded = load_oracle(oracle(str(folder), max_model_len=64, served_name="tiny"), ignore)
    assert (loaded.card.name, loaded.card.vocab_size, loaded.card.max_model_len) == ("tiny", 320, 64)
    assert loaded.card.tokenizer_digest == bundle_digest(describe(folder).files)


def test_the_oracle_has_a_tokenizer_of_its_own_for_any_other_name() -> None:
    loaded = load_oracle(oracle("anything", oracle_vocab_size=777), ignore)
    assert (loaded.card.name, loaded.card.vocab_size) == ("anything", 777)
    check_bundle(loaded.tokenizer_files, loaded.card.tokenizer_digest)
    assert tokenizer_vocab_size(loaded.tokenizer_files["tokenizer.json"]) == 777


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(CardError, match="513 is more than the model's 512"):
        load_oracle(oracle(str(folder), max_model_len=513), ignore)


def test_a_folder_is_served_by_its_name(folder: Path) -> None:
    assert [served_name(str(folder)), served_name("Qwen/Qwen2.5-0.5B")] == [folder.name, "Qwen/Qwen2.5-0.5B"]


LONG = {"chunk_size": 262_144, "local_size": 8_192, "original_max_position_embeddings": 262_144}


def test_a_model_that_needs_dual_chunk_attention_is_served_up_to_where_it_does_not(folder: Path) -> None:
    rewrite(folder / "config.json", max_position_embeddings=1_010_000, dual_chunk_attention_config=LONG)
    described = describe(folder)
    assert described.max_model_len == 262_144
    (note,) = described.notes
    assert note.startswith("max_model_len is 262144, not the 1010000 of config.json: dual chunk attention")
    loaded = load_oracle(oracle(str(folder)), ignore)
    assert (loaded.card.max_model_len, loaded.notes) == (262_144, described.notes)
    with pytest.raises(CardError, match=r"300000 is more than the model's 262144 positions \(max_model_len is "):
        load_oracle(oracle(str(folder), max_model_len=300_000), ignore)


@pytest.mark.parametrize("wrong", [{}, {"chunk_size": 1}, [], 5, {"original_max_position_embeddings": "many"}])
def test_dual_chunk_attention_without_a_length_is_refused_by_name(folder: Path, wrong: object) -> None:
    rewrite(folder / "config.json", dual_chunk_attention_config=wrong)
    with pytest.raises(CardError, match="dual_chunk_attention_config is not supported, and its original_max_position"):
        describe(folder)


def test_no_dual_chunk_attention_is_no_note(folder: Path) -> None:
    rewrite(folder / "config.json", dual_chunk_attention_config=None)
    assert describe(folder).notes == ()
    rewrite(folder / "config.json", dual_chunk_attention_config=LONG)
    assert (describe(folder).notes, describe(folder).max_model_len) == ((), 512)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("config.json", f'{{"a": {DEEP}', "nested too deeply"),
        ("generation_config.json", f'{{"a": {DEEP}', "nested too deeply"),
        ("tokenizer.json", f'{{"a": {DEEP}', "nested too deeply"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1e300}}}', "largest id"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 99999999999999999999}}}', "largest id|not a tokenizer"),
        ("generation_config.json", '{"temperature": "warm"}', "temperature is 'warm', should be a number in"),
        ("generation_config.json", '{"top_k": 1e999}', "top_k is .inf., should be|out of range"),
        ("generation_config.json", '{"eos_token_id": 3.5}', "eos_token_id"),
        ("config.json", json.dumps(tiny_config(max_position_embeddings=10**30)), "max_position_embeddings"),
        ("config.json", json.dumps(tiny_config(rope_scaling={"type": "yarn", "factor": 1e300})), "rope_scaling"),
        ("config.json", json.dumps(tiny_config(rope_scaling={"type": "yarn", "factor": "4"})), "rope_scaling"),
        ("config.json", json.dumps(tiny_config(rope_scaling="yarn")), "rope_scaling is not an object"),
        ("config.json", json.dumps(tiny_config(vocab_size=10**30)), "vocab_size"),
        ("config.json", json.dumps(tiny_config(vocab_size="v" * 10_000)), "vocab_size of 'v{39}$"),
    ],
)
def test_numbers_and_depths_that_no_file_has_are_sentences(folder: Path, name: str, content: str, error: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CardError, match=error):
        describe(folder)


def test_a_template_that_is_no_text_is_refused_by_its_name(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes("{# é #}{{ messages[0].content }}".encode())
    assert "chat_template.jinja" in describe(folder).files
    (folder / "chat_template.jinja").write_bytes("{# é #}{{ messages[0].content }}".encode("latin-1"))
    with pytest.raises(CardError, match=r"chat_template\.jinja is not UTF-8: byte 3 begins no character"):
        describe(folder)
