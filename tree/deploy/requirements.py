"""Prints the packages of pyproject.toml but torch: a gateway does without it, and the worker's image installs it first,
by its exact version. With the stubs of the dialects: images speak all of them."""

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path) -> list[str]:
    """Requirement lines."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["vllm-dialect"]
    return [each for each in wanted if re.split(r"[^A-Za-z0-9_-]", each, maxsplit=1)[0] != "torch"]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"))) + "\n")
