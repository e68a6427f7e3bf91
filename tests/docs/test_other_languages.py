"""docs/clients.md: what its examples for Go, Java and Rust name is in the contract, where no compiler of theirs is at
hand. The one for Node is run (tests/interop/test_node.py)."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

from octavo.v1 import common_pb2, inference_pb2
from tests.docs.blocks import blocks_of

FILES = (common_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR)
MESSAGES: dict[str, Descriptor] = {name: each for file in FILES for name, each in file.message_types_by_name.items()}
ENUMS: dict[str, EnumDescriptor] = {name: each for file in FILES for name, each in file.enum_types_by_name.items()}
FIELDS = {each.name for message in MESSAGES.values() for each in (*message.fields, *message.oneofs)}
CODE = {
    language: "".join(block.code for block in blocks_of("docs/clients.md") if block.language == language)
    for language in ("go", "java", "rust")
}


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def unknown(names: set[str], known: set[str]) -> set[str]:
    assert names
    return names - known


def test_the_page_names_every_file_of_the_contract(repository: Path) -> None:
    first = (repository / "docs/clients.md").read_text().partition("\n\n## ")[0]
    there = {path.name for path in (repository / "proto/octavo/v1").glob("*.proto")}
    assert set(re.findall(r"`(\w+\.proto)`", first)) == there


def test_messages_are_those_of_the_contract() -> None:
    java = set(re.findall(r"(\w+)\.newBuilder\(\)", CODE["java"]))
    go = set(re.findall(r"&pb\.(\w+)\{", CODE["go"]))
    rust = set(re.findall(r"pb::(\w+) \{", CODE["rust"]))
    go -= {"GenerateRequest_Chat"}  # a wrapper that Go makes of a oneof
    assert unknown(java | go | rust, set(MESSAGES)) == set()


def test_fields_are_those_of_the_contract() -> None:
    java = {snake(name) for name in re.findall(r"\.(?:set|add|get)([A-Z]\w+)\(", CODE["java"])} - {"messages"}
    go = {snake(name) for name in re.findall(r"[{,\s]([A-Z]\w+): ", CODE["go"])}
    rust = set(re.findall(r"[{,]\s*(\w+): ", CODE["rust"]))
    assert unknown(java, FIELDS) == set()
    assert unknown(go, FIELDS) == set()
    assert unknown(rust, FIELDS) == set()


def test_values_are_those_of_the_contract() -> None:
    values = {value.name for enum in ENUMS.values() for value in enum.values}
    assert unknown(set(re.findall(r"\bCHAT_ROLE_\w+", CODE["java"] + CODE["go"])), values) == set()
    assert {f"CHAT_ROLE_{name.upper()}" for name in re.findall(r"ChatRole::(\w+)", CODE["rust"])} <= values


@pytest.mark.parametrize("language", CODE)
def test_every_example_sets_a_deadline_and_asks_for_generate(language: str) -> None:
    assert re.search(r"timeout|deadline", CODE[language], re.IGNORECASE)
    assert re.search(r"\.generate\(", CODE[language], re.IGNORECASE)
