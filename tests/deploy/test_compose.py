"""docker-compose.yml and the Dockerfiles: valid, hardened, and about files and settings that exist."""

import ast
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from jsonschema.validators import validator_for  # type: ignore[import-untyped]

from octavo.cli.settings.groups import COMMANDS

ROLES = ("gateway", "worker")


@pytest.fixture
def compose(repository: Path) -> dict[str, Any]:
    return yaml.safe_load((repository / "docker-compose.yml").read_text())


@pytest.fixture
def schema() -> dict[str, Any]:
    """Of the compose specification, as check-jsonschema carries it."""
    return json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())


def test_the_file_is_valid_under_the_compose_specification(compose: dict[str, Any], schema: dict[str, Any]) -> None:
    validator_for(schema)(schema).validate(compose)


def test_the_schema_would_refuse_a_mistyped_key(compose: dict[str, Any], schema: dict[str, Any]) -> None:
    compose["services"]["gateway"]["prots"] = []
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        validator_for(schema)(schema).validate(compose)


def test_every_file_that_is_mounted_or_built_from_is_there(compose: dict[str, Any], repository: Path) -> None:
    paths = [service["build"]["dockerfile"] for service in compose["services"].values() if "build" in service]
    for service in compose["services"].values():
        paths += [volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("./")]
    assert len(paths) >= 5
    assert [path for path in paths if not (repository / path).exists()] == []


def test_every_named_volume_and_network_is_declared(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith("./")}
        assert named <= compose["volumes"].keys()
        assert set(service["networks"]) <= compose["networks"].keys()


def test_every_variable_is_a_setting_of_its_command(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        names = {name for name in service.get("environment", {}) if name.startswith("OCTAVO_")}
        if not names:
            continue
        group = COMMANDS[service["command"][0]]
        assert {name.removeprefix("OCTAVO_").lower() for name in names} <= group.model_fields.keys()


def test_workers_have_the_hubs_variables_of_whoever_starts_them(compose: dict[str, Any]) -> None:
    """A key without a value is passed on where it is set, and is not set otherwise: an empty token would be refused."""
    for name in ("worker-gpu", "worker-cpu"):
        environment = compose["services"][name]["environment"]
        assert {variable: environment[variable] for variable in ("HF_TOKEN", "HF_ENDPOINT")} == {
            "HF_TOKEN": None,
            "HF_ENDPOINT": None,
        }
    assert "HF_TOKEN" not in compose["services"]["gateway"]["environment"]


def test_no_port_is_published_beyond_loopback_and_nobody_keeps_privileges(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]


def variables_of_image(repository: Path, role: str) -> dict[str, str]:
    text = (repository / f"deploy/{role}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split()[1:])


def test_workers_keep_what_they_compile_in_a_volume_of_their_user(compose: dict[str, Any], repository: Path) -> None:
    """Their root is read-only, and what Docker mounts as tmpfs nobody can execute from."""
    variables = variables_of_image(repository, "worker")
    text = (repository / "deploy/worker.Dockerfile").read_text()
    (made,) = re.findall(r"install -d -m 0700 -o octavo -g octavo ([^\n]*)", text)
    for role in ("worker-gpu", "worker-cpu"):
        service = compose["services"][role]
        mounted = dict(reversed(volume.split(":", 1)) for volume in service["volumes"])
        for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME"):
            (folder,) = [each for each in mounted if Path(variables[name]).is_relative_to(each)]
            assert not compose["volumes"][mounted[folder]]  # a plain volume: kept, and not mounted noexec
            assert folder in made.split()  # an empty volume takes owner and mode of the image's folder
            assert name not in service["environment"]
        assert not any(folder.startswith("/var/cache") for folder in service["tmpfs"])


def test_gateway_and_workers_tell_docker_how_they_are(compose: dict[str, Any], repository: Path) -> None:
    """By commands that exist (tests/cli/test_main.py has their flags)."""
    expected = {"gateway": ["octavo", "health", "--live"], "worker": ["octavo", "health", "--worker"]}
    for role, command in expected.items():
        text = (repository / f"deploy/{role}.Dockerfile").read_text()
        (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
        assert json.loads(check) == command
        assert all("healthcheck" not in each for name, each in compose["services"].items() if name.startswith(role))


def test_every_dependency_says_what_it_waits_for_and_can_be_fulfilled(
    compose: dict[str, Any], repository: Path
) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in ("service_started", "service_healthy"), name
            if how["condition"] == "service_healthy":
                image = services[other].get("build", {}).get("dockerfile")
                has_check = "healthcheck" in services[other] or "HEALTHCHECK" in (repository / image).read_text()
                assert has_check, f"{name} waits for {other} to be healthy, which has no health check"
            outside = set(services[other].get("profiles", ())) - set(service.get("profiles", ()))
            assert not outside or how.get("required") is False, f"{other} may not be started with {name}"
    for worker in ("worker-gpu", "worker-cpu"):
        assert services["openai"]["depends_on"][worker]["condition"] == "service_healthy"
        assert "gateway" in services[worker]["depends_on"]


def test_the_grace_of_docker_is_longer_than_a_drain(compose: dict[str, Any]) -> None:
    drain_s = COMMANDS["gateway"].model_fields["drain_grace_s"].default
    assert int(compose["services"]["gateway"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_the_run_folder_is_0700_and_of_the_images_user(compose: dict[str, Any], repository: Path) -> None:
    options = compose["volumes"]["run"]["driver_opts"]["o"]
    for role in ROLES:
        text = (repository / f"deploy/{role}.Dockerfile").read_text()
        uid = re.search(r"useradd --uid (\d+)", text)
        assert uid is not None
        assert options == f"uid={uid[1]},gid={uid[1]},mode=0700"


def test_prometheus_scrapes_the_ports_that_the_services_listen_on(compose: dict[str, Any], repository: Path) -> None:
    config = yaml.safe_load((repository / "deploy/prometheus/prometheus.yml").read_text())
    targets = {target for job in config["scrape_configs"] for target in job["static_configs"][0]["targets"]}
    metrics_port = COMMANDS["gateway"].model_fields["metrics_port"].default
    worker = compose["services"]["worker-cpu"]
    alias = worker["networks"]["octavo"]["aliases"][0]
    assert targets == {f"gateway:{metrics_port}", f"{alias}:{worker['environment']['OCTAVO_WORKER_METRICS_PORT']}"}


@pytest.mark.parametrize("role", ROLES)
def test_an_image_copies_what_is_there_and_runs_as_nobody(repository: Path, role: str) -> None:
    lines = (repository / f"deploy/{role}.Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    missing = [path for paths in copied for path in paths if not (repository / path).exists()]
    assert missing == []
    assert "USER octavo" in lines
    assert lines.index("USER octavo") > max(index for index, line in enumerate(lines) if line.startswith("FROM "))
    assert 'ENTRYPOINT ["octavo"]' in lines
    assert f'CMD ["{role}"]' in lines


@pytest.mark.parametrize("role", ROLES)
def test_an_image_gets_every_folder_that_is_packaged(repository: Path, role: str) -> None:
    tree = ast.parse((repository / "setup.py").read_text())
    (folders,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS"
    )
    packaged = set(ast.literal_eval(folders))
    lines = (repository / f"deploy/{role}.Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert packaged
    assert packaged | {"proto", "setup.py"} <= copied


def test_the_gateway_of_others_is_the_one_that_is_tested(compose: dict[str, Any], repository: Path) -> None:
    tested = (repository / "tests/interop/smg.txt").read_text().split()
    text = (repository / "deploy/smg.Dockerfile").read_text()
    pins = re.findall(r"^(smg[\w-]*==[\d.]+)", (repository / "deploy/locks/smg.txt").read_text(), re.MULTILINE)
    assert len(pins) == 2
    assert set(pins) <= set(tested)
    assert compose["services"]["openai"]["profiles"] == ["openai"]
    assert "USER octavo" in text
