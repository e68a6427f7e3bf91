"""A request of Dynamo's as an octavo.v1 request: every option served, or refused by its name."""

import json
from typing import Any

import pytest

from octavo.gateway.errors import InvalidRequest
from octavo.gateway.validation.generate import check_generate
from octavo.v1 import inference_pb2 as pb
from octavo_dynamo.request import RefusedError, generate_request, is_request_id, name_here

# As Dynamo 1.6.1's frontend sends it: every option of its three parts, and what only routers read.
UNSET: dict[str, Any] = {
    "model": "as-callers-call-it",
    "token_ids": [6140, 445, 269],
    "sampling_options": dict.fromkeys(
        (
            *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
            *("top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
            "guided_decoding",
        )
    ),
    "stop_conditions": dict.fromkeys(
        (
            *("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "min_tokens"),
            *("ignore_eos", "max_thinking_tokens"),
        )
    ),
    "output_options": dict.fromkeys(
        ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
    ),
    "eos_token_ids": [],
    "mdc_sum": "772d",
    "annotations": [],
    "routing": {"dp_rank": 0},
    "router_config_override": None,
    "extra_args": {"nvext": {"cache_salt": "abc"}},
}


def translated(part: str = "", **options: object) -> pb.GenerateRequest:
    """With these options in a part of the request, or beside its parts; what a service would refuse is refused."""
    request = UNSET | ({part: UNSET[part] | options} if part else options)
    made = generate_request(request, request_id="one", model="folio-chat")
    check_generate(made)
    return made


def test_a_request_without_options_has_none() -> None:
    made = translated()
    assert (made.request_id, made.model, list(made.token_ids.ids)) == ("one", "folio-chat", [6140, 445, 269])
    assert not made.sampling.ListFields()
    assert not made.stop.ListFields()
    assert [field.name for field, _ in made.output.ListFields()] == ["format"]
    assert made.output.format == pb.OUTPUT_FORMAT_TOKEN_IDS
    assert not made.HasField("constraint")
    assert not made.HasField("priority")
    assert made.cache_salt == ""


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("temperature", 0.0, {"temperature": 0.0}),
        ("temperature", 0.5, {"temperature": 0.5}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("min_p", 0.25, {"min_p": 0.25}),
        ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
        ("presence_penalty", -1.5, {"presence_penalty": -1.5}),
        ("frequency_penalty", 1.5, {"frequency_penalty": 1.5}),
        ("top_k", 7, {"top_k": 7}),
        ("top_k", 0, {"top_k": 0}),
        ("top_k", -1, {"top_k": 0}),
        ("seed", 0, {"seed": 0}),
        ("seed", 2**63 - 1, {"seed": 2**63 - 1}),
        ("n", 1, {}),
        ("best_of", 1, {}),
        ("use_beam_search", False, {}),
        ("length_penalty", 1.0, {}),
    ],
)
def test_sampling_options_are_sampling_parameters(name: str, value: object, ours: dict[str, Any]) -> None:
    sampling = translated("sampling_options", **{name: value}).sampling
    assert sampling == pb.SamplingParams(**ours)
    assert {field.name for field, _ in sampling.ListFields()} == set(ours)


@pytest.mark.parametrize(
    ("guided", "kind", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["yes", "no"], "backend": "llguidance"}, "choice", pb.Choice(options=["yes", "no"])),
    ],
)
def test_a_guide_is_a_constraint(guided: dict[str, object], kind: str, value: object) -> None:
    constraint = translated("sampling_options", guided_decoding=guided).constraint
    assert constraint.WhichOneof("kind") == kind
    assert getattr(constraint, kind) == value


def test_stop_conditions_are_stop_conditions() -> None:
    hidden = {"stop_token_ids_hidden": [6141, 6139]}
    assert list(translated("stop_conditions", **hidden).stop.token_ids) == [6141, 6139]
    options = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [7, 6141], "stop_token_ids_visible": [8]}
    stop = translated("stop_conditions", **options, **hidden).stop
    assert (stop.max_tokens, stop.min_tokens, list(stop.token_ids)) == (9, 3, [7, 6141, 8, 6139])
    assert not stop.HasField("ignore_eos")


def test_who_ignores_the_models_ends_keeps_its_own() -> None:
    options = {"stop_token_ids": [7, 6141], "stop_token_ids_hidden": [6141, 6139], "ignore_eos": True}
    stop = translated("stop_conditions", **options).stop
    assert (list(stop.token_ids), stop.ignore_eos) == ([7], True)


def test_stop_strings_need_the_services_text() -> None:
    made = translated("stop_conditions", stop=["a", "b"])
    assert list(made.stop.strings) == ["a", "b"]
    assert made.output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    assert translated("sampling_options", include_stop_str_in_output=True).stop.include_stop


def test_output_options_are_output_options() -> None:
    output = translated("output_options", logprobs=0, prompt_logprobs=2, skip_special_tokens=False).output
    assert output.HasField("logprobs")
    assert (output.logprobs, output.prompt_logprobs, output.skip_special_tokens) == (0, 2, False)


@pytest.mark.parametrize(("priority", "ours"), [(7, 7), (-7, -7), (1000, 100), (-(2**31), -100)])
def test_a_priority_is_one_within_our_bounds(priority: int, ours: int) -> None:
    assert translated("routing", priority=priority).priority == ours


def test_a_salt_parts_caches() -> None:
    assert translated("routing", cache_salt="abc").cache_salt == "abc"


@pytest.mark.parametrize(
    ("part", "options", "name"),
    [
        ("sampling_options", {"n": 2}, "sampling_options.n must be 1, not 2"),
        ("sampling_options", {"best_of": 2}, "sampling_options.best_of must be 1, not 2"),
        ("sampling_options", {"seed": -1}, "sampling_options.seed"),
        ("sampling_options", {"top_k": -2}, "sampling_options.top_k"),
        ("sampling_options", {"use_beam_search": True}, "sampling_options.use_beam_search"),
        ("sampling_options", {"length_penalty": 2.0}, "sampling_options.length_penalty"),
        ("sampling_options", {"bad_words_token_ids": [[1]]}, "sampling_options.bad_words_token_ids"),
        ("sampling_options", {"of_tomorrow": 0}, "sampling_options.of_tomorrow is not supported"),
        ("sampling_options", {"guided_decoding": {"structural_tag": {}}}, "guided_decoding.structural_tag"),
        ("sampling_options", {"guided_decoding": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ("sampling_options", {"guided_decoding": {"regex": "a", "backend": "xgrammar"}}, "guided_decoding.backend"),
        ("sampling_options", {"guided_decoding": {"regex": "a", "json": {}}}, "only one of json, regex"),
        ("stop_conditions", {"max_thinking_tokens": 5}, "stop_conditions.max_thinking_tokens"),
        ("output_options", {"no_stop_trim": True}, "output_options.no_stop_trim"),
        ("routing", {"lora_name": "a"}, "routing.lora_name"),
        ("routing", {"dp_rank": 1}, "routing.dp_rank"),
        ("", {"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
        ("", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("", {"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ("", {"bootstrap_info": {"bootstrap_room": 1}}, "bootstrap_info"),
        ("", {"encoder_result": {"handle": "x"}}, "encoder_result"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(part: str, options: dict[str, object], name: str) -> None:
    with pytest.raises(RefusedError, match=name.replace("[", r"\[")) as raised:
        translated(part, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "options", "name"),
    [
        ("sampling_options", {"temperature": 101.0}, "sampling_options.temperature"),
        ("sampling_options", {"guided_decoding": {"regex": ""}}, "sampling_options.guided_decoding.regex"),
        ("stop_conditions", {"stop": [""]}, "stop_conditions.stop[0]"),
        ("stop_conditions", {"max_tokens": 0}, "stop_conditions.max_tokens"),
        ("output_options", {"logprobs": 21}, "output_options.logprobs"),
        ("routing", {"cache_salt": "s" * 129}, "routing.cache_salt"),
    ],
)
def test_what_the_service_refuses_has_dynamos_name(part: str, options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        translated(part, **options)
    assert [name_here(each.field) for each in raised.value.violations] == [name]


def test_an_id_that_no_service_takes_is_left_out() -> None:
    assert is_request_id("f383d4f2-88ff-4a97-bea3-c0a5e2b6b019")
    for text in ("", "a b", "ä", "x" * 129, "a\n"):
        assert not is_request_id(text)
        assert generate_request(UNSET, request_id=text, model="").request_id == ""


def test_a_request_goes_through_json() -> None:
    """Nothing here needs what JSON has not."""
    assert generate_request(json.loads(json.dumps(UNSET)), request_id="one", model="folio-chat") == translated()
