"""What the command line says an output must look like."""

from collections.abc import Sequence
from pathlib import Path

from octavo.client_requests import GenerateFields

from cli.errors import usage


def constraint_fields(
    *,
    json_schema: Path | None,
    format_as_annotation: bool,
    json_object: bool,
    regex: str,
    ebnf: Path | None,
    choices: Sequence[str] | None,
) -> GenerateFields:
    """The fields that are given; the files are read. Raises CliError."""
    fields = GenerateFields()
    if json_schema is not None:
        fields["json_schema"] = _read(json_schema, "--json-schema")
    if json_object:
        fields["json_object"] = True
    if regex:
        fields["regex"] = regex
    if ebnf is not None:
        fields["ebnf"] = _read(ebnf, "--ebnf")
    if choices:
        fields["choice"] = list(choices)
    if len(fields) > 1:
        raise usage("an output has one constraint at most", f"given were {', '.join(fields)}", "give one of them")
    if format_as_annotation:
        if json_schema is None:
            raise usage(
                "--format-as-annotation is for JSON schemas", "no --json-schema is given", "give one, or leave it out"
            )
        fields["format_as_annotation"] = True
    return fields


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"cannot read the file of {flag}", f"{path}: {error}", "give a file of UTF-8 text") from None
