"""docs/api-reference.md is current, and the contract of today serves callers of every release."""

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

pytest.importorskip("grpc_tools.protoc")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract", ROOT / "proto/contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_command_writes(contract: ModuleType) -> None:
    assert contract.page() == contract.PAGE.read_text(), "python proto/contract.py page"


def test_every_entry_of_the_reference_is_explained(contract: ModuleType) -> None:
    rows = [line for line in contract.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


def test_every_link_of_the_reference_leads_to_a_heading(contract: ModuleType) -> None:
    page = contract.page()
    headings = {re.sub(r"[^a-z0-9_-]", "", each.lower()) for each in re.findall(r"^#+ (\S+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\(#([\w-]+)\)", page)) <= headings


@pytest.mark.parametrize("release", sorted((ROOT / "proto/released").glob("*.binpb")), ids=lambda path: path.stem)
def test_callers_of_a_release_are_served(release: Path, contract: ModuleType) -> None:
    before = descriptor_pb2.FileDescriptorSet.FromString(release.read_bytes())
    assert len(before.file) == 4
    assert contract.breaks(before, contract.compiled()) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("string request_id = 1;", "string request_id = 9;", "AbortRequest.request_id was 1"),
        ("string request_id = 1;", "string id = 1;", "AbortRequest.request_id is gone"),
        ("string request_id = 1;", "repeated string request_id = 1;", "AbortRequest.request_id was 1, optional string"),
        ("string request_id = 1;", "bytes request_id = 1;", "is 1, optional bytes"),
        ("rpc Drain(", "rpc Dry(", "AdminService/Drain is gone"),
        ("returns (GetLoadResponse)", "returns (stream GetLoadResponse)", "is .octavo.v1.GetLoadRequest to stream of"),
    ],
)
def test_what_would_break_callers_is_named(
    old: str, new: str, complaint: str, contract: ModuleType, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "proto/octavo/v1", tmp_path / "octavo/v1", ignore=shutil.ignore_patterns("*.py*"))
    file = tmp_path / "octavo/v1/admin.proto"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    found = contract.breaks(contract.compiled(), contract.compiled(tmp_path))
    assert any(complaint in each for each in found), found


def test_what_is_added_breaks_nobody(contract: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto/octavo/v1", tmp_path / "octavo/v1", ignore=shutil.ignore_patterns("*.py*"))
    file = tmp_path / "octavo/v1/common.proto"
    file.write_text(file.read_text() + "\nmessage New { string field = 1; }\n")
    assert contract.breaks(contract.compiled(), contract.compiled(tmp_path)) == []
