"""docs/parameters.md against the code: every parameter of the other servers has its row, and every row is true."""

from pathlib import Path

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as vllm

from octavo.client.requests import generate_request
from octavo.gateway.dialects.kserve.sampling import apply_sampling
from octavo.gateway.dialects.vllm.translate import SERVED, check_served
from octavo.gateway.errors import InvalidRequest
from octavo.gateway.servicers.model import supported_paths
from octavo.gateway.validation.generate import check_generate
from octavo.v1 import inference_pb2 as pb

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parameters.md").read_text()
NONE = "—"

# The fields of vllm.SamplingParams without those that begin with an underscore, of main in 2026.
VLLM = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
output_kind stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids
extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
trace_decode_token_ids
"""

# SGLang's docs/basic_usage/sampling_params.md, and what else its SamplingParams has.
SGLANG = """
text input_ids input_embeds image_data audio_data rid return_logprob logprob_start_len top_logprobs_num
token_ids_logprob return_text_in_logprobs stream lora_path custom_logit_processor return_hidden_states
max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
min_new_tokens json_schema regex ebnf structural_tag n ignore_eos skip_special_tokens spaces_between_special_tokens
no_stop_trim custom_params stop_regex sampling_seed logit_bias stream_interval
"""


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, cells without blanks and backticks."""
    section = PAGE.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


VLLM_ROWS = table("vLLM's SamplingParams")
SGLANG_ROWS = table("SGLang's parameters")
SERVED_PATHS = supported_paths(pb.GenerateRequest.DESCRIPTOR)


def test_every_parameter_has_one_row_and_no_other_has() -> None:
    assert sorted(row[0] for row in VLLM_ROWS) == sorted(VLLM.split())
    assert sorted(row[0] for row in SGLANG_ROWS) == sorted(SGLANG.split())


@pytest.mark.parametrize("row", [*VLLM_ROWS, *SGLANG_ROWS], ids=lambda row: row[0])
def test_the_field_of_octavo_is_served_or_there_is_none_and_the_client_names_it(row: list[str]) -> None:
    name, field = row[:2]
    if field != NONE:
        assert any(path == field or path.startswith(f"{field}.") for path in SERVED_PATHS)
        return
    assert name not in {path.rsplit(".", 1)[-1] for path in SERVED_PATHS}
    with pytest.raises(TypeError, match=name):
        generate_request(**{"token_ids": [1], name: 1})


@pytest.mark.parametrize("row", VLLM_ROWS, ids=lambda row: row[0])
def test_the_column_of_vllm_engine_is_true(row: list[str]) -> None:
    name, _, column = row[:3]
    fields = vllm.SamplingParams.DESCRIPTOR.fields_by_name
    if name == "structured_outputs":
        assert {"json_schema", "regex", "grammar", "json_object", "choice"} <= SERVED["SamplingParams"]
    elif column == NONE:
        assert name not in fields
    else:
        assert name in fields
        assert (column == "yes") == (name in SERVED["SamplingParams"])


@pytest.mark.parametrize("row", VLLM_ROWS, ids=lambda row: row[0])
def test_the_column_of_kserve_is_true(row: list[str]) -> None:
    name, column = row[0], row[3]
    values = {
        "stop": ["x"], "stop_token_ids": [1], "logit_bias": {"1": 1.0}, "allowed_token_ids": [1], "bad_words": ["x"],
        "structured_outputs": {"regex": "x"}, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": True,
    }  # fmt: skip
    if column == "yes":
        apply_sampling(pb.GenerateRequest(), {name: values.get(name, 1)}, prefix="")
        return
    with pytest.raises(InvalidRequest) as caught:
        apply_sampling(pb.GenerateRequest(), {name: values.get(name, 1)}, prefix="parameters.")
    assert [violation.field for violation in caught.value.violations] == [f"parameters.{name}"]


def test_what_vllm_engine_has_and_octavo_does_not_is_refused_by_its_path() -> None:
    request = vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(structural_tag="x"))
    with pytest.raises(InvalidRequest) as caught:
        check_served(request)
    assert [violation.field for violation in caught.value.violations] == ["sampling_params.structural_tag"]
    unserved = {*vllm.SamplingParams.DESCRIPTOR.fields_by_name} - SERVED["SamplingParams"]
    assert unserved == {"structural_tag"}
    assert "`structural_tag` of VllmEngine is refused" in PAGE


def test_a_field_that_octavo_does_not_know_is_refused_by_its_number() -> None:
    request = pb.GenerateRequest(text="x")
    request.sampling.MergeFromString(b"\xf8\x7f\x01")  # field 2047
    assert len(UnknownFieldSet(request.sampling)) == 1
    with pytest.raises(InvalidRequest) as caught:
        check_generate(request)
    assert [violation.field for violation in caught.value.violations] == ["sampling.#2047"]


def test_every_field_that_the_other_servers_do_not_know_is_named() -> None:
    section = PAGE.split("## What else Octavo has", 1)[1].split("\n## ", 1)[0]
    named = {row[1] for row in [*VLLM_ROWS, *SGLANG_ROWS]} | {"truncate_prompt_tokens", "constraint"}
    rest = [path for path in SERVED_PATHS if not any(path == each or path.startswith(f"{each}.") for each in named)]
    of_the_prompt = ("model", "chat.messages", "chat.add_generation_prompt", "chat.tool_")
    for path in rest:
        if not path.startswith(of_the_prompt):
            assert any(f"`{each}`" in section for each in (path, path.rsplit(".", 1)[0])), path
