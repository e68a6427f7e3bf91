"""The manifests of deploy/kubernetes, as they are in the files."""

from pathlib import Path
from typing import Any

import yaml

from tests.support.services.service import REPOSITORY

FOLDER = REPOSITORY / "deploy/kubernetes"


def manifests(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Every resource, as it is in the files."""
    found = []
    for file in sorted(folder.rglob("*.yaml")):
        if file.name not in ("kustomization.yaml", "adapter-values.yaml", "references.yaml"):
            found += list(yaml.safe_load_all(file.read_text()))
    return found


def of_kind(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(resources: list[dict[str, Any]], role: str) -> dict[str, Any]:
    name = f"octavo-{role}"
    if any((each["kind"], each["metadata"]["name"]) == ("StatefulSet", name) for each in resources):
        pod: dict[str, Any] = of_kind(resources, "StatefulSet", name)["spec"]["template"]["spec"]
    else:
        group = of_kind(resources, "LeaderWorkerSet", name)["spec"]["leaderWorkerTemplate"]
        pod = group["workerTemplate"]["spec"]
    return pod


def shared_values() -> dict[str, str]:
    """The values in the generated ConfigMap."""
    (generator,) = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generator["literals"])
