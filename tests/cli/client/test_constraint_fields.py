from pathlib import Path

import pytest

from octavo.cli.client.generate_options import constraint_fields
from octavo.cli.errors import CliError

NOTHING: dict[str, object] = {
    "json_schema": None, "format_as_annotation": False, "json_object": False, "regex": None, "ebnf": None,
    "choices": (),
}  # fmt: skip


def test_files_are_read_and_what_is_not_given_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"const": "é"}', encoding="utf-8")
    assert constraint_fields(**NOTHING) == {}  # type: ignore[arg-type]
    for given, expected in (
        ({"json_schema": file}, {"json_schema": '{"const": "é"}'}),
        (
            {"json_schema": file, "format_as_annotation": True},
            {"json_schema": '{"const": "é"}', "format_as_annotation": True},
        ),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"regex": ""}, {"regex": ""}),  # which the service refuses
        ({"ebnf": file}, {"ebnf": '{"const": "é"}'}),
        ({"choices": ["a", "b"]}, {"choice": ["a", "b"]}),
    ):
        assert constraint_fields(**NOTHING | given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "flag"), [("json_schema", "--json-schema"), ("ebnf", "--ebnf")])
def test_an_empty_file_is_told_with_its_flag(field: str, flag: str, tmp_path: Path) -> None:
    """The service could name only a field of the request."""
    file = tmp_path / "empty"
    file.touch()
    with pytest.raises(CliError) as caught:
        constraint_fields(**NOTHING | {field: file})  # type: ignore[arg-type]
    assert (caught.value.what, caught.value.numbers) == (f"the file of {flag} is empty", str(file))


def test_several_constraints_and_unreadable_files_are_usage_errors(tmp_path: Path) -> None:
    for given in ({"json_object": True, "regex": "a"}, {"ebnf": tmp_path / "none"}, {"json_schema": tmp_path},
                  {"format_as_annotation": True}, {"format_as_annotation": True, "regex": "a"}):  # fmt: skip
        with pytest.raises(CliError):
            constraint_fields(**NOTHING | given)  # type: ignore[arg-type]
