"""Checks before any process is started: models, device, environment variables that no setting reads.

A mistake that would end every worker takes a second to report here; there it takes a quarter of a minute and gives two
errors.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.cli.errors import CliError, nearest, usage
from octavo.cli.serve.combinations import check_combinations
from octavo.cli.serve.ports import MAX_PORT, free_port
from octavo.cli.settings.addresses import endpoints_of
from octavo.cli.settings.groups import ALL_KEYS, ServeSettings, WorkerSettings
from octavo.cli.settings.key_files import require_keys
from octavo.cli.settings.model_names import check_revision, is_local, split_model
from octavo.cli.settings.setting import ENV_PREFIX
from octavo.wire.endpoints import EndpointError, EndpointsFile, Transport, is_address, is_wildcard
from octavo.wire.host import most_descriptors

OTHER_VARIABLES = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in (
        *("CONFIG", "DEBUG", "SUPERVISOR_PID"),  # of the command line
        *("NATIVE", "SUMS"),  # of kernels (model/cpu/native.py), of ranks
        *(
            "SHARED",
            "HYPOTHESIS",
            "INTEROP",
            "INTEROP_DIR",
            "RAYLETS",
            "RAY_CLIENT",
            "FIGURES",
            "SCHEMAS",
            "KILLS",
            "CANCELS",
            "SEED",
        ),  # of tests
    )
)
BACKENDS = ("auto", "reference", "sdpa")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_CUDA_TIMEOUT_S = 60.0
_COUNT_GPUS = """import ctypes, os, runpy
from importlib.util import find_spec
if find_spec("torch") is None:
    raise SystemExit("torch is not installed")
about = runpy.run_path(os.path.join(os.path.dirname(find_spec("torch").origin), "version.py"))
count, version = ctypes.c_int(0), ctypes.c_int(0)
if about.get("hip"):
    import torch
    count.value = torch.cuda.device_count()
elif about["cuda"]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDriverGetVersion(ctypes.byref(version))
        if version.value // 1000 >= int(about["cuda"].partition(".")[0]):
            driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        pass
parts = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip().startswith("MIG-")]
print(about["__version__"], about["cuda"] or "no", len(parts) if parts and count.value else count.value)
"""  # without importing torch, which takes seconds; a process sees only one MIG part, but each child can get its own
# In a child process, since it needs torch, which the supervisor does not.
_CUT = """import json, sys
from pathlib import Path
from octavo.worker.loading.group import IndivisibleModel, check_cut
try:
    check_cut(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
except IndivisibleModel as error:
    print(json.dumps([error.what, error.numbers, error.change]))
"""


def check_workers(settings: ServeSettings | WorkerSettings) -> None:
    """Check models and device. Raises CliError, CpuIsaError, CheckpointError, CardError."""
    check_device(settings.device)
    check_group_devices(settings)
    check_ranks_have_a_model(settings)
    if settings.runner == "torch":
        check_isa(settings.cpu_isa)
        _check_models(settings.model, settings)


def check_ranks_have_a_model(settings: ServeSettings | WorkerSettings) -> None:
    """Raises CliError if several ranks are asked for with a runner that has no model."""
    if settings.runner != "torch" and settings.tensor_parallel_size > 1:
        numbers = f"--tensor-parallel-size is {settings.tensor_parallel_size}, and the oracle has none"
        raise usage("there is no model to cut into parts", numbers, "leave it or --runner oracle out")


def check_peers(settings: ServeSettings) -> None:
    """Check the settings by which gateways on other hosts reach those on this one. Raises CliError."""
    from octavo.cli.settings.gateway_config import require_control_endpoint  # grpc: not in every worker

    if settings.control_endpoint and settings.cluster_gateways:
        raise usage(
            "--cluster-gateways does not go with --control-endpoint",
            "gateways of another service could not know those that a cluster places",
            "leave one of them out",
        )
    require_control_endpoint(settings)
    if not settings.control_endpoint:
        return
    advice = "write it as tcp://10.0.0.1:5556"
    (first,) = endpoints_of("--control-endpoint", [settings.control_endpoint], advice=advice)
    endpoints_of("--peer-endpoint", settings.peer_endpoint, advice=advice)
    try:
        if settings.peer_endpoints_file:
            EndpointsFile(settings.peer_endpoints_file).changed()
    except EndpointError as error:
        advice = "write tcp://10.0.0.1:5556 and the like into it, one on each line"
        raise usage("bad value for --peer-endpoints-file", str(error), advice) from None
    last = first.port + settings.num_gateways - 1
    if first.transport is not Transport.TCP or not first.port or last > MAX_PORT:
        raise usage(
            "bad value for --control-endpoint",
            f"{settings.control_endpoint!r} is no tcp://host:port with a port for each of {settings.num_gateways} "
            "gateways",
            "write it as tcp://10.0.0.1:5556; gateway n adds n, and sockets within this host are serve's own",
        )
    if settings.gateway_key_file is None:
        raise usage(
            "--control-endpoint needs --gateway-key-file",
            "gateways of several hosts trust each other by one key pair",
            "make one with octavo keys new gateway, and give it to the gateways of every host",
        )
    require_keys("--gateway-key-file", [settings.gateway_key_file])


def check_workers_here(settings: ServeSettings) -> None:
    """`check_workers`, with its errors, and CliError if cluster settings are given."""
    if settings.cluster_address:
        raise usage(
            "--cluster-address needs --cluster",
            "the workers are on this host, and nobody asks for the address",
            "give --cluster auto as well, or leave the address out",
        )
    if settings.cluster_gateways:
        raise usage(
            "--cluster-gateways needs --cluster",
            f"{settings.cluster_gateways} gateways on hosts of a cluster are asked for, and none is named",
            "give --cluster auto as well, or --gateways for more of them on this host",
        )
    check_workers(settings)


def check_workers_elsewhere(settings: ServeSettings) -> None:
    """For workers on the hosts of a cluster, check what can be known here. Raises CliError, CheckpointError,
    CardError."""
    _check_name(settings.device)
    if settings.cluster_address:
        _check_own_address(settings.cluster_address)
    if ":" in settings.device:
        numbers = f"--device is {settings.device}, and the cluster chooses the GPU of each worker"
        raise usage("--cluster does not go with the number of a GPU", numbers, "give --device cuda")
    if settings.runner == "torch":
        # A folder on this host is one that the others must have, too.
        _check_models([each for each in settings.model if is_local(split_model(each)[1])], settings)


def _check_own_address(address: str) -> None:
    if not is_address(address) or is_wildcard(address):
        numbers = f"{address!r} is no address that workers could dial"
        raise usage("bad value for --cluster-address", numbers, "write one of this host's, as 10.0.0.1")
    try:
        free_port(address, set())
    except OSError as error:
        numbers = f"{address!r} is no address of this host: {error.strerror or error}"
        raise usage("bad value for --cluster-address", numbers, "write one of this host's, as 10.0.0.1") from None


def check_traces() -> None:
    """Raises CliError if the environment asks for traces that are not available."""
    from octavo.gateway.observability.tracing import TracingError, asks_for_traces

    try:
        asks_for_traces()
    except TracingError as error:
        raise usage("traces cannot be had", str(error), "or set OTEL_SDK_DISABLED=true") from None


def check_connections(settings: ServeSettings) -> None:
    """Raises TooFewDescriptors if a gateway may not open as many files as it needs for its callers' connections."""
    from octavo.gateway.config import ConnectionConfig
    from octavo.gateway.rpc.connections import connection_limits

    connection_limits(ConnectionConfig(max_connections=settings.max_connections), most_descriptors())


def check_front(settings: ServeSettings) -> None:
    """Raises CliError if OpenAI's HTTP interface cannot be served with these settings."""
    if settings.openai is None:
        return
    if settings.tls_client_ca_file is not None and settings.api_keys_file is None:
        numbers = "--tls-client-ca-file is given, and certificates of HTTP callers cannot be passed on to gateways"
        raise usage("--openai does not go with client certificates alone", numbers, "add --api-keys-file")


def check_isa(cpu_isa: str) -> None:
    """Raises model.cpu.isa.CpuIsaError if this CPU lacks these instructions."""
    from octavo.model.cpu.isa import hidden_above

    hidden_above(cpu_isa)


def check_device(device: str) -> None:
    """Raises CliError if there is no such device."""
    _check_name(device)
    if device.startswith("cuda"):
        _check_gpu(device, *_gpus())


def check_device_here(device: str) -> None:
    """`check_device` in a process that uses torch itself."""
    _check_name(device)
    if device.startswith("cuda"):
        import torch

        _check_gpu(device, torch.__version__, torch.version.cuda or "no", str(torch.cuda.device_count()))


def check_group_devices(settings: ServeSettings | WorkerSettings) -> None:
    """Raises CliError if ranks use GPUs and there is not one for every rank of every group."""
    size = settings.tensor_parallel_size
    if size == 1 or settings.device == "cpu" or settings.runner != "torch":
        return
    if ":" in settings.device:
        numbers = f"--device is {settings.device}, and a group of {size} ranks takes the first {size} GPUs"
        raise usage(
            "a group names no GPU", numbers, "give --device cuda, and CUDA_VISIBLE_DEVICES to choose among them"
        )
    _, cuda, count = _gpus()
    if settings.device == "auto" and int(count) == 0:
        return
    num_groups = settings.workers * len(settings.model) if isinstance(settings, ServeSettings) else 1
    if num_groups * size > int(count):
        groups = f" in {num_groups} workers" if num_groups > 1 else ""
        has = "torch is built without CUDA" if cuda == "no" else f"torch sees {count}"
        numbers = f"--tensor-parallel-size {size}{groups} needs {num_groups * size} GPUs, and {has}"
        raise CliError("there are too few GPUs", numbers, "give fewer ranks or workers, or --device cpu")


def _check_name(device: str) -> None:
    if not _DEVICE.fullmatch(device):
        advice = "give auto, cpu, cuda or cuda:N"
        raise usage("bad value for --device", f"--device is {device!r}, which is no device", advice)


def check_numbers(settings: ServeSettings | WorkerSettings) -> None:
    """Raises CliError for numbers that do not go together, or an unknown attention backend."""
    tokens, seqs = settings.max_batch_tokens, settings.max_num_seqs
    if tokens is not None and tokens < seqs:
        numbers = f"--max-batch-tokens is {tokens}, and --max-num-seqs is {seqs}: each of them takes a token of a step"
        advice = f"give --max-batch-tokens {seqs} or more, or --max-num-seqs {tokens} or less"
        raise usage("too few tokens in a step", numbers, advice)
    if settings.attention_backend not in BACKENDS:
        numbers = f"--attention-backend is {settings.attention_backend!r}, which is none of them"
        raise usage("bad value for --attention-backend", numbers, f"give one of {', '.join(BACKENDS)}")
    if settings.check_numerics_limit is not None and settings.check_numerics == "off":
        numbers = f"--check-numerics-limit is {settings.check_numerics_limit:g}, and nothing is checked against it"
        raise usage("--check-numerics-limit needs --check-numerics on", numbers, "give both, or neither")


def _check_gpu(device: str, version: str, cuda: str, count: str) -> None:
    if int(count) <= int(device.partition(":")[2] or 0):
        has = f"torch {version} is built without CUDA" if cuda == "no" else f"torch {version} sees {count} GPUs"
        advice = "leave --device out, or give cpu; `octavo doctor` lists the devices"
        raise CliError("there is no such GPU", f"--device is {device}, and {has}", advice)


def serves_on_gpu(settings: ServeSettings | WorkerSettings, devices: Path = Path("/dev")) -> bool:
    """Whether the workers will use a GPU, found out without importing torch: `auto` uses one if the system has one that
    is not hidden, and torch is built for GPUs."""
    if settings.runner != "torch" or settings.device == "cpu":
        return False
    if settings.device.startswith("cuda"):
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    with contextlib.suppress(PackageNotFoundError):
        return not version("torch").endswith("+cpu") and any(devices.glob("nvidia[0-9]*"))
    return False


def _gpus() -> tuple[str, str, str]:
    """torch's version, its CUDA version or "no", and the number of GPUs. Asked in a child process, since the driver
    keeps its resources until the process ends, and the supervisor does not need it. Raises CliError."""
    command = [sys.executable, "-P", "-c", _COUNT_GPUS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CUDA_TIMEOUT_S, check=True)
        version, cuda, count = done.stdout.split()[-3:]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        last = str(detail).strip().splitlines()[-1:] or ["no details"]
        raise CliError("torch cannot be asked for GPUs", last[0], "`octavo doctor` looks at torch") from None
    return version, cuda, count


def check_names(models: Sequence[str]) -> None:
    """Raises CliError if two models would be served by the same name."""
    from octavo.worker.loading.model_card import served_name

    taken: dict[str, str] = {}
    for model in models:
        given, checkpoint = split_model(model)
        name = given or served_name(checkpoint)
        if name in taken:
            same = f"--model {taken[name]} and --model {model} are both served as {name!r}"
            advice = "leave one out, or name it: --model NAME=CHECKPOINT; several workers of one model: --workers"
            raise usage("two models with one name", same, advice)
        taken[name] = model


def _check_models(known: Sequence[str], settings: ServeSettings | WorkerSettings) -> None:
    """Check that settings go with each other, and with the models in `known`. Raises CliError, CheckpointError,
    CardError."""
    check_numbers(settings)
    check_combinations(settings)
    check_names(settings.model)
    check_revision(settings.model, settings.revision)
    for model in known:
        _check_cut(check_model(model, settings), model, settings)


def check_model(model: str, settings: ServeSettings | WorkerSettings) -> Path | None:
    """Check a model. Returns its folder on this machine, or None if it is still to be downloaded. Raises
    CheckpointError, CardError, CliError."""
    from octavo.model.checkpoint.source import look_for_checkpoint
    from octavo.worker.loading.model_card import describe

    _, checkpoint = split_model(model)
    folder = look_for_checkpoint(checkpoint, revision=settings.revision)
    if folder is None:  # still to be downloaded
        return None
    described = describe(folder)
    longest = settings.max_model_len or described.max_model_len
    if longest > described.max_model_len:
        numbers = f"--max-model-len is {longest:,}, and {checkpoint} has {described.max_model_len:,} positions"
        raise usage("the context is longer than the model's", numbers, "give less, or leave --max-model-len out")
    if settings.num_blocks is not None and settings.num_blocks * settings.block_size < longest:
        raise too_few_blocks(settings.num_blocks, settings.block_size, longest)
    return folder


def _check_cut(folder: Path | None, model: str, settings: ServeSettings | WorkerSettings) -> None:
    """Raises CliError if the checkpoint cannot be divided among the ranks."""
    size = settings.tensor_parallel_size
    if size == 1 or folder is None:
        return
    command = [sys.executable, "-P", "-c", _CUT, str(folder), str(size), split_model(model)[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:  # any other failure is left for the worker to report
        raise usage(*json.loads(done.stdout))


def too_few_blocks(num_blocks: int, block_size: int, longest: int) -> CliError:
    """The error for a pool that has no room for one request of the maximum length."""
    wanted = -(-longest // block_size)
    return usage(
        "the KV pool is smaller than one request may be",
        f"--num-blocks {num_blocks} × --block-size {block_size} = {num_blocks * block_size:,} tokens, and requests may "
        f"have {longest:,}",
        f"give --num-blocks {wanted} or more, or --max-model-len {num_blocks * block_size}, or leave --num-blocks out",
    )


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Environment variables that look like ours but that nothing reads, each with advice."""
    found = []
    for name in sorted(environment):
        key = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and key not in ALL_KEYS and name not in OTHER_VARIABLES:
            meant = nearest(key, ALL_KEYS)
            found.append((name, f"did you mean {ENV_PREFIX}{meant.upper()}?" if meant else "unset it"))
    return found


def warn_of_variables() -> None:
    """Print a warning to stderr for each of `unknown_variables`."""
    for name, advice in unknown_variables():
        print(f"warning: {name} is no setting, so nothing reads it; {advice}", file=sys.stderr)  # noqa: T201
