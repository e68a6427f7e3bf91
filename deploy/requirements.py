"""Prints what the image of a role needs, as requirements: `make lock` turns them into deploy/locks/ROLE.txt, which the
images install. Images speak all dialects, and build Octavo itself, server and client, with what is in their lock.

    python deploy/requirements.py gateway | worker-cpu | worker-cuda
"""

import re
import runpy
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""What torch's build for CPUs needs. The build itself is on no index that the lock is made from:
deploy/install_torch.py installs it, by its exact version."""


def requirements(role: str) -> list[str]:
    """Requirement lines. Raises KeyError for a role that has no image."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    wanted = pyproject["build-system"]["requires"] + project["dependencies"]
    wanted += project["optional-dependencies"]["vllm-dialect"]
    without_torch = [each for each in wanted if _name(each) not in ("torch", "octavo-client")]
    torch = runpy.run_path(str(ROOT / "deploy/install_torch.py"))["TORCH"]
    return {
        "gateway": without_torch,
        "worker-cpu": [*without_torch, *TORCH_NEEDS],
        "worker-cuda": [*without_torch, f"torch=={torch}", *project["optional-dependencies"]["cuda"]],
    }[role]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1])) + "\n")
