"""The contract as data: its page, what was released of it, and what would break callers.

    python proto/contract.py page                 writes docs/api-reference.md from the comments of the .proto files
    python proto/contract.py release VERSION      writes proto/released/VERSION.binpb, which later contracts are held to

Needs grpcio-tools. Must not know: the server.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
PAGE = PROTO.parent / "docs/api-reference.md"
RELEASED = PROTO / "released"
PACKAGE = "octavo.v1"

Field = pb.FieldDescriptorProto
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in Field.Type.items()}
# Paths in a file's source info: the number of the field of a descriptor, then an index, and so on.
_MESSAGE, _ENUM, _SERVICE, _FIELD, _INNER, _INNER_ENUM, _VALUE, _METHOD = 4, 5, 6, 2, 3, 4, 2, 2


def compiled(root: Path = PROTO, *, comments: bool = False) -> pb.FileDescriptorSet:
    """The files of our own package."""
    names = sorted(str(path.relative_to(root)) for path in (root / "octavo/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        arguments = ["protoc", f"-I{root}", f"--descriptor_set_out={out}", *names]
        if protoc.main(arguments[:2] + (["--include_source_info"] if comments else []) + arguments[2:]) != 0:
            raise SystemExit("error: the .proto files do not compile")
        return pb.FileDescriptorSet.FromString(out.read_bytes())


# ---------------------------------------------------------------- what breaks callers


def breaks(before: pb.FileDescriptorSet, after: pb.FileDescriptorSet) -> list[str]:
    """What callers of `before` would miss, or read otherwise, in `after`: a sentence each. Additions break nothing."""
    old, new = dict(_facts(before)), dict(_facts(after))
    gone = [f"{name} is gone" for name in old if name not in new]
    changed = [f"{name} was {old[name]}, is {new[name]}" for name in old if name in new and new[name] != old[name]]
    return sorted(gone + changed)


def _facts(files: pb.FileDescriptorSet) -> Iterator[tuple[str, str]]:
    """Everything that the wire or generated code knows, as name and fact."""
    for file in files.file:
        for message in file.message_type:
            yield from _message_facts(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            yield from _enum_facts(f"{file.package}.{enum.name}", enum)
        for service in file.service:
            for rpc in service.method:
                ends = [rpc.input_type, rpc.output_type]
                streams = zip((rpc.client_streaming, rpc.server_streaming), ends, strict=True)
                told = " to ".join(f"stream of {end}" if is_stream else end for is_stream, end in streams)
                yield f"rpc {file.package}.{service.name}/{rpc.name}", told


def _message_facts(name: str, message: pb.DescriptorProto) -> Iterator[tuple[str, str]]:
    yield f"message {name}", "there"
    for field in message.field:
        kind = field.type_name or _TYPES[field.type]
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        label = Field.Label.Name(field.label).removeprefix("LABEL_").lower()
        yield f"field {name}.{field.name}", f"{field.number}, {label} {kind}{f' of {oneof}' if oneof else ''}"
    for inner in message.nested_type:
        yield from _message_facts(f"{name}.{inner.name}", inner)
    for enum in message.enum_type:
        yield from _enum_facts(f"{name}.{enum.name}", enum)


def _enum_facts(name: str, enum: pb.EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"value {name}.{value.name}", str(value.number)


def last_release() -> Path:
    """Of those that are kept, the latest."""
    return max(RELEASED.glob("*.binpb"), key=lambda path: [int(part) for part in path.stem.split(".")])


# ---------------------------------------------------------------- the page


def page() -> str:
    """docs/api-reference.md."""
    files = [file for file in compiled(comments=True).file if file.package == PACKAGE]
    lines = [
        "# API reference",
        "",
        "<!-- made by `python proto/contract.py page` from the comments in proto/octavo/v1;"
        " tests/client/test_contract.py fails where it is not current -->",
        "",
        "Every method, message and value of `octavo.v1`. [api.md](api.md) says how they work together, "
        "[parameters.md](parameters.md) what became of the",
        "parameters of other servers. A field marked *optional* tells unset from zero; the others are zero, empty or "
        "false where they are unset.",
    ]
    for file in files:
        lines += _services(file)
    for file in files:
        for index, message in enumerate(file.message_type):
            lines += _message(file, message, message.name, (_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            lines += _enum(file, enum, enum.name, (_ENUM, index))
    return "\n".join(lines) + "\n"


def _comment(file: pb.FileDescriptorProto, path: tuple[int, ...]) -> str:
    """In one line; a bar would end a cell."""
    found = [each.leading_comments for each in file.source_code_info.location if tuple(each.path) == path]
    return " ".join(" ".join(found).split()).replace("|", "\\|")


def _services(file: pb.FileDescriptorProto) -> Iterator[str]:
    for index, service in enumerate(file.service):
        yield from ("", f"## {service.name}", "", _comment(file, (_SERVICE, index)), "")
        yield from ("| method | takes | gives | |", "|---|---|---|---|")
        for number, rpc in enumerate(service.method):
            takes = ("stream of " if rpc.client_streaming else "") + _link(rpc.input_type)
            gives = ("stream of " if rpc.server_streaming else "") + _link(rpc.output_type)
            told = _comment(file, (_SERVICE, index, _METHOD, number))
            yield f"| `{rpc.name}` | {takes} | {gives} | {told} |"


def _message(
    file: pb.FileDescriptorProto, message: pb.DescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[str]:
    yield from ("", f"### {name}", "", _comment(file, path), "")
    entries = {inner.name: inner for inner in message.nested_type if inner.options.map_entry}
    if message.field:
        yield from ("| field | number | type | |", "|---|---|---|---|")
    for index, field in enumerate(message.field):
        told = _comment(file, (*path, _FIELD, index))
        yield f"| `{field.name}` | {field.number} | {_type(message, field, entries)} | {told} |"
    for index, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from _message(file, inner, f"{name}.{inner.name}", (*path, _INNER, index))
    for index, enum in enumerate(message.enum_type):
        yield from _enum(file, enum, f"{name}.{enum.name}", (*path, _INNER_ENUM, index))


def _type(message: pb.DescriptorProto, field: Field, entries: dict[str, pb.DescriptorProto]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return f"map of {' to '.join(_plain(each) for each in entry.field)}"
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {_plain(field)}"
    if field.proto3_optional:
        return f"optional {_plain(field)}"
    if field.HasField("oneof_index"):
        return f"{_plain(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return _plain(field)


def _plain(field: Field) -> str:
    return _link(field.type_name) if field.type_name else _TYPES[field.type]


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".")
    if not name.startswith(f"{PACKAGE}."):
        return f"`{name}`"
    short = name.removeprefix(f"{PACKAGE}.")
    return f"[{short}](#{re.sub(r'[^a-z0-9_-]', '', short.lower())})"


def _enum(
    file: pb.FileDescriptorProto, enum: pb.EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[str]:
    yield from ("", f"### {name}", "", _comment(file, path), "", "| value | number | |", "|---|---|---|")
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_comment(file, (*path, _VALUE, index))} |"


def main(arguments: list[str]) -> None:
    """Writes a file."""
    match arguments:
        case ["page"]:
            PAGE.write_text(page())
        case ["release", version] if re.fullmatch(r"\d+\.\d+\.\d+", version):
            RELEASED.mkdir(exist_ok=True)
            (RELEASED / f"{version}.binpb").write_bytes(compiled().SerializeToString(deterministic=True))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
