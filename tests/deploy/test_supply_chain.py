"""docs/supply-chain.md is true: images are pinned by digest and pinned anew by a script, which a played docker answers;
an SBOM lists what a lock has."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64
DOCKER = """#!/bin/bash
test "$1 $2 $3" = "buildx imagetools inspect" && test "$5 $6" = "--format {{.Manifest.Digest}}" || exit 9
case "$4" in good:*) echo %s;; *) echo "ERROR: $4: not found" >&2; exit 1;; esac
"""


def references(repository: Path) -> dict[str, list[str]]:
    """The images of others, by file: those with a tag."""
    files = [repository / "docker-compose.yml", *sorted((repository / "deploy").glob("*.Dockerfile"))]
    pattern = r"^(?:FROM|\s*image:)\s+(\S+:\S+)"
    return {file.name: re.findall(pattern, file.read_text(), re.MULTILINE) for file in files}


def test_every_image_of_others_has_a_tag_and_a_digest(repository: Path) -> None:
    found = references(repository)
    assert {name: len(images) > 0 for name, images in found.items()} == dict.fromkeys(found, True)
    pinned = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
    assert [each for images in found.values() for each in images if not pinned.fullmatch(each)] == []


def test_a_tag_has_one_digest_everywhere(repository: Path) -> None:
    pairs = {tuple(each.split("@")) for images in references(repository).values() for each in images}
    assert len({tag for tag, _ in pairs}) == len(pairs)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """One with two images and a docker that knows `good` only."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(repository / "deploy/pin_images.py", tmp_path / "deploy")
    (tmp_path / "bin/docker").write_text(DOCKER % NEW)
    (tmp_path / "bin/docker").chmod(0o755)
    (tmp_path / "docker-compose.yml").write_text(f"services:\n  a:\n    image: good:1.0@{OLD}\n  b:\n    image: ours\n")
    (tmp_path / "deploy/a.Dockerfile").write_text("FROM good:1.0 AS build\nRUN true\nFROM good:1.0\n")
    return tmp_path


def pin(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(checkout / "deploy/pin_images.py")],
        env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_digests_are_taken_anew_and_tags_stay(checkout: Path) -> None:
    done = pin(checkout)
    assert (done.returncode, done.stdout) == (0, f"good:1.0@{NEW}\n")
    expected = f"services:\n  a:\n    image: good:1.0@{NEW}\n  b:\n    image: ours\n"
    assert (checkout / "docker-compose.yml").read_text() == expected
    assert (checkout / "deploy/a.Dockerfile").read_text() == (
        f"FROM good:1.0@{NEW} AS build\nRUN true\nFROM good:1.0@{NEW}\n"
    )


def test_an_image_that_no_registry_knows_changes_nothing(checkout: Path) -> None:
    (checkout / "deploy/b.Dockerfile").write_text("FROM bad:2\n")
    before = (checkout / "docker-compose.yml").read_text()
    done = pin(checkout)
    assert done.returncode == 1
    assert done.stderr == "error: bad:2: its registry gave no digest: ERROR: bad:2: not found\n"
    assert (checkout / "docker-compose.yml").read_text() == before


def test_without_docker_one_sentence_says_so(checkout: Path) -> None:
    (checkout / "bin/docker").unlink()
    done = subprocess.run(
        [sys.executable, str(checkout / "deploy/pin_images.py")],
        env={"PATH": str(checkout / "bin")}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"error: good:1\.0: docker cannot be asked: .*\n", done.stderr)


def test_an_sbom_lists_all_that_an_image_installs(repository: Path, tmp_path: Path) -> None:
    tool = repository / ".venv-supply-chain/bin/cyclonedx-py"
    if not tool.exists():
        pytest.skip("cyclonedx-py is not there (make sbom installs it)")
    subprocess.run(
        ["make", "sbom", f"SBOM={tmp_path}", "PYTHON=python3"],
        cwd=repository, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    locks = sorted((repository / "deploy/locks").glob("*.txt"))
    assert len(locks) == 4
    for lock in locks:
        document = json.loads((tmp_path / f"sbom-{lock.stem}.cdx.json").read_text())
        listed = {(each["name"], each["version"]) for each in document["components"]}
        pinned = set(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(), re.MULTILINE))
        assert document["bomFormat"] == "CycloneDX"
        assert pinned <= listed
        assert listed - pinned == ({("torch", "2.13.0+cpu")} if lock.stem == "worker-cpu" else set())
        has_hashes = [
            any(where.get("hashes") for where in each["externalReferences"]) for each in document["components"]
        ]
        assert sum(has_hashes) == len(pinned)


def test_the_page_names_targets_and_files_that_exist(repository: Path) -> None:
    page = (repository / "docs/supply-chain.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", page))
    assert {"lock", "sbom", "audit", "pin-images"} <= targets
    makefile = (repository / "Makefile").read_text()
    assert [each for each in targets if not re.search(rf"^{each}:", makefile, re.MULTILINE)] == []
    named = set(re.findall(r"`((?:deploy|tests)/[\w./-]+)`", page))
    assert len(named) >= 5
    assert [each for each in named if not (repository / each).exists()] == []
