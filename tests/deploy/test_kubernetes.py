"""deploy/kubernetes: valid, hardened, about settings, files and metrics that exist."""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import promql_parser
import pytest
import yaml

from octavo.cli.settings.groups import COMMANDS, HealthSettings
from tests.support.services.kubernetes import FOLDER, manifests, of_kind, pod_of, shared_values
from tests.support.services.service import REPOSITORY

VERSIONS = ("1.30", "1.37")  # the oldest that has preStop's sleep, and the newest that the validator knows
OVERLAYS = ("cpu", "gpu", "tensor-parallel")
COMPONENTS = ("access", "autoscaling", "leader-worker-set", "monitoring")
OPERATORS = {"PodMonitor", "PrometheusRule"}  # of Prometheus's operator: no schema comes with Kubernetes

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlays; none here")


def render(overlay: str, *components: str, folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send, with components added as a user adds them."""
    lines = [f"resources: [{os.path.relpath(FOLDER / 'overlays' / overlay, folder)}]"]
    lines += [
        f"components: [{', '.join(os.path.relpath(FOLDER / 'components' / each, folder) for each in components)}]"
    ]
    (folder / "kustomization.yaml").write_text("namespace: octavo\n" + "\n".join(lines))
    return built(folder)


def built(folder: Path) -> list[dict[str, Any]]:
    """What its kustomization renders to."""
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def check_group(resource: Mapping[str, Any]) -> None:
    """A LeaderWorkerSet by what we know of its schema, and what is in it by Kubernetes's."""
    jsonschema.validate(resource, json.loads((Path(__file__).parent / "leader_worker_set.json").read_text()))
    template = resource["spec"]["leaderWorkerTemplate"]
    spec = {
        "serviceName": "octavo-worker",
        "selector": {"matchLabels": template["workerTemplate"]["metadata"]["labels"]},
        "template": template["workerTemplate"],
        "volumeClaimTemplates": template["volumeClaimTemplates"],
    }
    as_pods = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "octavo-worker"}, "spec": spec}
    kubernetes_validate.validate(as_pods, VERSIONS[0], strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid_under_the_schemas_of_kubernetes(version: str) -> None:
    resources = [each for each in manifests() if each["kind"] not in OPERATORS | {"LeaderWorkerSet"}]
    assert len(resources) >= 13
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_schemas_would_refuse_a_mistyped_key() -> None:
    resource = of_kind(manifests(), "StatefulSet", "octavo-worker")
    resource["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, VERSIONS[0], strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(
    "components",
    [
        *(each for size in range(5) for each in itertools.combinations(COMPONENTS, size)),
        tuple(reversed(COMPONENTS)),
        ("leader-worker-set", "autoscaling"),  # in the other order
    ],
    ids="+".join,
)
def test_every_overlay_renders_with_any_components(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    resources = render(overlay, *components, folder=tmp_path)
    for resource in resources:
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "octavo"
        if resource["kind"] == "LeaderWorkerSet":
            check_group(resource)
        elif resource["kind"] not in OPERATORS:
            kubernetes_validate.validate(resource, VERSIONS[0], strict=True)
    kinds = [each["kind"] for each in resources]
    assert ("HorizontalPodAutoscaler" in kinds) == ("autoscaling" in components)
    assert ("PodMonitor" in kinds) == ("monitoring" in components)
    kind = "LeaderWorkerSet" if "leader-worker-set" in components else "StatefulSet"
    assert [
        each["kind"] for each in resources if each["metadata"]["name"] == "octavo-worker" and "Set" in each["kind"]
    ] == [kind]
    replicas = of_kind(resources, kind, "octavo-worker")["spec"].get("replicas")
    if "autoscaling" in components:
        assert replicas is None  # else each apply would undo what the autoscaler did
        target = of_kind(resources, "HorizontalPodAutoscaler", "octavo-worker")["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (kind, "octavo-worker")
        assert target["apiVersion"] == of_kind(resources, kind, "octavo-worker")["apiVersion"]
    (shared,) = [each["metadata"]["name"] for each in resources if each["kind"] == "ConfigMap"]
    for role in ("gateway", "worker"):
        pod = pod_of(resources, role)
        check_pod(pod, role)
        assert pod["containers"][0]["envFrom"] == [{"configMapRef": {"name": shared}}]
    check_ranks(pod_of(resources, "worker"), is_parallel=overlay == "tensor-parallel")


def check_ranks(pod: Mapping[str, Any], *, is_parallel: bool) -> None:
    """A device for each rank, and memory that ranks share."""
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    size = int(values.get("OCTAVO_TENSOR_PARALLEL_SIZE") or 1)
    assert (size > 1) == is_parallel
    if values["OCTAVO_DEVICE"] == "cuda":
        assert container["resources"]["limits"]["nvidia.com/gpu"] == size
    shared = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    assert bool(shared) == is_parallel
    for name in shared:
        (volume,) = [each for each in pod["volumes"] if each["name"] == name]
        assert volume["emptyDir"]["medium"] == "Memory"


@needs_kubectl
@pytest.mark.parametrize("in_groups", [False, True])
def test_the_overlay_of_the_page_has_four_ranks_on_four_gpus(in_groups: bool, tmp_path: Path) -> None:
    """As docs/kubernetes.md has it, and as the resource of another one that makes groups of its workers."""
    page = (REPOSITORY / "docs/kubernetes.md").read_text()
    (own,) = [each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "TENSOR_PARALLEL_SIZE" in each]
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
    (inner / "kustomization.yaml").write_text(own.replace("deploy/", f"{os.path.relpath(REPOSITORY, inner)}/deploy/"))
    component = os.path.relpath(FOLDER / "components/leader-worker-set", outer)
    (outer / "kustomization.yaml").write_text(f"resources: [../inner]\ncomponents: [{component}]\n")
    resources = built(outer if in_groups else inner)
    assert in_groups == any(each["kind"] == "LeaderWorkerSet" for each in resources)
    pod = pod_of(resources, "worker")
    check_ranks(pod, is_parallel=True)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_our_schema_of_groups_would_refuse_a_mistyped_key() -> None:
    group = of_kind(manifests(), "LeaderWorkerSet", "octavo-worker")
    pods = of_kind(manifests(), "StatefulSet", "octavo-worker")["spec"]
    template = group["spec"]["leaderWorkerTemplate"]
    template |= {"workerTemplate": pods["template"], "volumeClaimTemplates": pods["volumeClaimTemplates"]}
    check_group(group)
    template["restartPolicies"] = template.pop("restartPolicy")
    with pytest.raises(jsonschema.ValidationError):
        check_group(group)


@needs_kubectl
def test_a_setting_of_ones_own_reaches_every_pod(tmp_path: Path) -> None:
    """It changes the name of the ConfigMap, which groups have to follow too."""
    render("gpu", "leader-worker-set", folder=tmp_path)
    more = "configMapGenerator: [{name: octavo, behavior: merge, literals: [OCTAVO_MODEL=mine]}]\n"
    more += "images: [{name: octavo-worker, newName: mine/octavo-worker, newTag: '7'}]\n"
    with (tmp_path / "kustomization.yaml").open("a") as file:
        file.write(f"\n{more}")
    resources = built(tmp_path)
    (shared,) = [each for each in resources if each["kind"] == "ConfigMap"]
    assert shared["data"]["OCTAVO_MODEL"] == "mine"
    for role in ("gateway", "worker"):
        (container,) = pod_of(resources, role)["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": shared["metadata"]["name"]}}]
    assert container["image"] == "mine/octavo-worker:7"


@needs_kubectl
def test_the_image_of_workers_on_cpus_goes_by_the_name_that_the_page_says(tmp_path: Path) -> None:
    render("cpu", folder=tmp_path)
    with (tmp_path / "kustomization.yaml").open("a") as file:
        file.write("\nimages: [{name: octavo-worker-cpu, newName: mine/cpu, newTag: '7'}]\n")
    (container,) = pod_of(built(tmp_path), "worker")["containers"]
    assert container["image"] == "mine/cpu:7"


def check_pod(pod: Mapping[str, Any], role: str) -> None:
    """Hardened, and with settings that its command has."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # a Service named octavo would set OCTAVO_PORT
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["args"] == [role]
    settings = set(COMMANDS[role].model_fields) | set(HealthSettings.model_fields)
    names = {each["name"].removeprefix("OCTAVO_").lower() for each in container["env"]}
    assert names - ({"hf_token"} if role == "worker" else set()) <= settings
    mounted = {each["name"] for each in container["volumeMounts"]}
    claims = {"cache", "models"} if role == "worker" else set()
    assert mounted == {each["name"] for each in pod["volumes"]} | claims
    # Else the kubelet opens all that is on a claim to the pod's group at each start, and kernels that others may write
    # are not loaded (model/cpu/native.py).
    assert not claims or pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert len([each["name"] for each in container["env"]]) == len(names)
    grace_s = int(shared_values()["OCTAVO_DRAIN_GRACE_S"])
    delay_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= grace_s + delay_s + 10
    if role == "gateway" and "OCTAVO_TLS_CERT_FILE" in {each["name"] for each in container["env"]}:
        assert "grpc" not in container["readinessProbe"]  # the kubelet's speaks no TLS
        assert "grpc" not in container["livenessProbe"]


def test_shared_values_are_settings_and_name_every_gateway() -> None:
    values = shared_values()
    known = set(COMMANDS["gateway"].model_fields) | set(COMMANDS["worker"].model_fields)
    assert {name.removeprefix("OCTAVO_").lower() for name in values} <= known
    gateway = of_kind(manifests(), "StatefulSet", "octavo-gateway")["spec"]
    names = [f"octavo-gateway-{n}.{gateway['serviceName']}" for n in range(gateway["replicas"])]
    assert values["OCTAVO_GATEWAY_ENDPOINT"].split(",") == [f"tcp://{each}:5555" for each in names]
    # Gateways look up the headless Service, which has all of them.
    assert values["OCTAVO_PEER_ENDPOINT"] == f"tcp://{gateway['serviceName']}:5556"


def test_names_of_gateways_resolve_before_they_are_ready() -> None:
    """A gateway becomes ready by its workers, which look it up by this Service."""
    spec = of_kind(manifests(), "Service", "octavo-gateways")["spec"]
    assert spec["publishNotReadyAddresses"] is True
    assert spec["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in of_kind(manifests(), "Service", "octavo")["spec"]


def test_every_port_that_is_named_is_one_of_the_container_and_open_to_those_who_need_it() -> None:
    resources = manifests()
    for role in ("gateway", "worker"):
        (container,) = pod_of(resources, role)["containers"]
        ports = {each["name"] for each in container["ports"]}
        policy = of_kind(resources, "NetworkPolicy", f"octavo-{role}")["spec"]
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
        services = [each for each in resources if each["kind"] == "Service"]
        chosen = [each for each in services if each["spec"]["selector"] == {"app.kubernetes.io/name": f"octavo-{role}"}]
        assert chosen
        assert {port["targetPort"] for each in chosen for port in each["spec"]["ports"]} <= ports
        monitor = of_kind(resources, "PodMonitor", f"octavo-{role}")["spec"]
        assert {each["port"] for each in monitor["podMetricsEndpoints"]} <= ports
        assert monitor["jobLabel"] == "app.kubernetes.io/name"  # alerts know the jobs octavo-gateway, octavo-worker


def test_secrets_are_mounted_for_their_group_and_only_what_a_role_needs() -> None:
    for role, expected in (("gateway", {"gateway.key", "worker.pub"}), ("worker", {"worker.key", "gateway.pub"})):
        pod = pod_of(manifests(), role)
        (keys,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
        assert {each["key"] for each in keys["items"]} == expected
        assert keys["defaultMode"] == 0o440  # as root's file that the pod's group reads: octavo.wire.keys admits it
        assert pod["securityContext"]["fsGroup"] == 10001


def test_workers_download_gated_models_by_either_protocol_where_there_is_a_token() -> None:
    resources = manifests()
    (token,) = [each for each in pod_of(resources, "worker")["containers"][0]["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "octavo-hub", "key": "token", "optional": True}}
    assert "HF_TOKEN" not in {each["name"] for each in pod_of(resources, "gateway")["containers"][0]["env"]}
    policy = of_kind(resources, "NetworkPolicy", "octavo-worker")["spec"]
    (hub,) = [rule for rule in policy["egress"] if rule["ports"] == [{"port": 443}]]
    assert [each["ipBlock"]["cidr"] for each in hub["to"]] == ["0.0.0.0/0", "::/0"]
    told = (FOLDER.parents[1] / "docs/kubernetes.md").read_text()
    assert 'create secret generic octavo-hub --from-literal=token="$HF_TOKEN"' in told


def test_the_rules_are_those_of_prometheus_alone() -> None:
    files = sorted((REPOSITORY / "deploy/prometheus/rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert of_kind(manifests(), "PrometheusRule", "octavo")["spec"]["groups"] == groups


def test_the_autoscaler_asks_for_a_metric_that_workers_have() -> None:
    (rule,) = yaml.safe_load((FOLDER / "components/autoscaling/adapter-values.yaml").read_text())["rules"]["custom"]
    (metric,) = of_kind(manifests(), "HorizontalPodAutoscaler", "octavo-worker")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod="a"')
    tree = promql_parser.parse(query)
    source = (REPOSITORY / "worker/metrics.py").read_text()
    assert '"octavo_request_queue_time_seconds"' in source
    assert query.count("octavo_request_queue_time_seconds_") == 2
    # The greater of the two, and the second alone where the first is smaller or nothing.
    assert isinstance(tree, promql_parser.BinaryExpr)
    assert str(tree.op) == "or"
    longest = 'max by (pod) (octavo_longest_wait_seconds{pod="a"})'
    assert tree.rhs.prettify() == promql_parser.parse(longest).prettify()
    assert isinstance(tree.lhs, promql_parser.BinaryExpr)
    assert str(tree.lhs.op) == ">"
    assert tree.lhs.rhs.prettify() == tree.rhs.prettify()
    assert '"octavo_longest_wait_seconds"' in source
