"""From a request's fields to the grammar that the worker gets."""

from octavo.gateway.dialects.kserve.sampling import apply_sampling
from octavo.gateway.requests.constraints import grammar_of
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Grammar, GrammarKind

FORMATTED = '{"format": "int32"}'


def test_formats_as_annotations_reach_schemas_and_tools() -> None:
    schema = pb.GenerateRequest(constraint=pb.Constraint(json_schema=FORMATTED), format_as_annotation=True)
    assert grammar_of(schema) == Grammar(kind=GrammarKind.JSON_SCHEMA, source=FORMATTED, format_as_annotation=True)
    chat = pb.Chat(tools=[pb.ToolDefinition(name="f", parameters_json=FORMATTED)], tool_choice=pb.TOOL_CHOICE_REQUIRED)
    for wish in (True, False):
        grammar = grammar_of(pb.GenerateRequest(chat=chat, format_as_annotation=wish))
        assert grammar is not None
        assert (grammar.kind, grammar.format_as_annotation) == (GrammarKind.TOOL_CALLS, wish)


def test_numbers_in_parameters_of_tools_stay_as_they_are_written() -> None:
    parameters = '{"properties": {"n": {"minimum": 0.12345678901234567890, "maximum": 1e400}}}'
    tools = [pb.ToolDefinition(name='f"g', parameters_json=parameters), pb.ToolDefinition(name="h")]
    chat = pb.Chat(tools=tools, tool_choice=pb.TOOL_CHOICE_NAMED, tool_name='f"g')
    grammar = grammar_of(pb.GenerateRequest(chat=chat))
    assert grammar is not None
    assert grammar.source == f'{{"tools": [{{"name": "f\\"g", "parameters": {parameters}}}], "max_calls": 1}}'
    chat = pb.Chat(tools=tools, tool_choice=pb.TOOL_CHOICE_REQUIRED)
    grammar = grammar_of(pb.GenerateRequest(chat=chat))
    assert grammar is not None
    assert grammar.source.endswith('{"name": "h", "parameters": null}], "max_calls": null}')


def test_kserve_asks_for_formats_as_annotations_beside_the_schema() -> None:
    request = pb.GenerateRequest()
    wish = {"json": {"format": "int32"}, "format_as_annotation": True}
    apply_sampling(request, {"structured_outputs": wish}, prefix="")
    assert request.format_as_annotation
    assert request.constraint.json_schema == FORMATTED
