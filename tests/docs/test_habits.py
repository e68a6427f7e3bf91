"""What runs at a commit and at a push: the hooks and the workflow are valid, and call only what a checkout has."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def targets(repository: Path) -> set[str]:
    """Of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))


def complaints(workflow: Path) -> str:
    """Of the schema that check-jsonschema brings."""
    command = [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(workflow)], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout if done.returncode else ""


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def test_the_workflow_has_the_schema_of_workflows(repository: Path) -> None:
    assert complaints(repository / ".github/workflows/ci.yml") == ""


def test_a_workflow_with_an_unknown_word_is_found(tmp_path: Path) -> None:
    """The control of the test above."""
    (tmp_path / "ci.yml").write_text("on: push\njobs: {a: {runs-on: ubuntu-24.04, stepz: []}}\n")
    assert "stepz" in complaints(tmp_path / "ci.yml")


def test_each_step_of_the_workflow_is_one_of_actions_or_a_file_of_the_checkout(repository: Path) -> None:
    steps = [step for job in read(repository / ".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert [step["uses"] for step in steps if "uses" in step and not step["uses"].startswith("actions/")] == []
    runs = [step["run"].split()[0] for step in steps if "run" in step]
    assert ".ci/run" in runs
    for each in runs:
        assert (repository / each).stat().st_mode & 0o111, each


def test_what_the_workflow_runs_calls_targets_of_the_makefile(repository: Path, targets: set[str]) -> None:
    called = re.findall(r"^make ([a-z-]+)", (repository / ".ci/run").read_text(), re.MULTILINE)
    assert len(called) >= 4
    assert set(called) <= targets


@pytest.mark.parametrize(
    "failing", ["", "interop", "breaking", "lint", "test", "test-isa", "test-interop", "test-cluster"]
)
def test_it_ends_with_the_first_that_fails_and_without_what_runs_aside(
    failing: str, repository: Path, tmp_path: Path
) -> None:
    """make writes what it is called for here, and takes longer for what is fetched."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "make").write_text(
        f'#!/bin/sh\n[ $1 = interop ] && sleep 0.5\necho $1 >> {tmp_path}/made\necho it is $1\n[ $1 != "{failing}" ]\n'
    )
    for program in ("make", "apt-get"):
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        [repository / ".ci/run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    made = (tmp_path / "made").read_text().split()
    steps = ["dev", "ray", "test", "test-isa"]
    aside = {"lint": steps.index("test-isa"), "breaking": steps.index("test-isa"), "interop": len(steps)}
    of_others = failing in ("", "test-interop", "test-cluster")  # these two run beside each other
    num_begun = len(steps) if of_others else aside.get(failing) or steps.index(failing) + 1
    assert [each for each in made if each in steps] == steps[:num_begun], done.stderr
    assert {"test-interop", "test-cluster"} & set(made) == ({"test-interop", "test-cluster"} if of_others else set())
    assert (done.returncode == 0) is (not failing)
    if of_others:
        assert {"interop", "lint", "breaking"} <= set(made[: made.index("test-interop")])
        assert done.stdout.split("\n")[-3:-1] == ["it is test-cluster", "it is test-interop"]


def test_hooks_download_nothing_and_call_what_the_environment_has(repository: Path, targets: set[str]) -> None:
    hooks = [hook for repo in read(repository / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    repos = [repo["repo"] for repo in read(repository / ".pre-commit-config.yaml")["repos"]]
    assert set(repos) == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        program, argument = hook["entry"].split()[:2]
        if program == "make":
            assert argument in targets
        else:
            assert (Path(sys.executable).parent / Path(program).name).exists(), program
