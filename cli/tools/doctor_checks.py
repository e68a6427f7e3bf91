"""The checks of `octavo doctor` that need no model: packages, devices, CPU, memory, run directory, ports, certificates,
open files, variables. Each returns what it has found."""

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import psutil

from octavo.cli.errors import CliError
from octavo.cli.serve.ports import asked_ports, listening_hosts, require_address, require_free
from octavo.cli.serve.preflight import unknown_variables
from octavo.cli.settings.gateway_config import access_config
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.setting import variable_of
from octavo.gateway.auth.expiry import CERT_FILE, CLIENT_CA_FILE, SOON_S, expiries
from octavo.gateway.auth.key_file import AccessFileError
from octavo.gateway.auth.tls import load_tls
from octavo.wire.host import usable_cores
from octavo.wire.run_dir import RunDirError, check_run_dir, default_run_dir

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 64 * 2**20


class Verdict(Enum):
    """How serious a finding is."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report, with advice if there is something to do."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def check_python() -> Finding:
    """3.11 or later."""
    is_good = sys.version_info[:2] >= MIN_PYTHON
    return Finding(
        name="python",
        verdict=Verdict.GOOD if is_good else Verdict.BAD,
        detail=f"{platform.python_version()} at {sys.executable}",
        advice="" if is_good else "Octavo needs Python 3.11 or later",
    )


def check_packages() -> list[Finding]:
    """Every package that pyproject.toml asks for is there, in a version that it allows."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(each) for each in importlib.metadata.requires("octavo") or ()]
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install -e ./proto -e . in the checkout (make demo does it)"
        return [Finding(name="octavo", verdict=Verdict.WARNING, detail="not installed as a package", advice=advice)]
    required = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [found for each in required if (found := _package(each.name, str(each.specifier), each.specifier.contains))]
    return wrong or [Finding(name="packages", verdict=Verdict.GOOD, detail=f"all {len(required)} in allowed versions")]


def _package(name: str, wanted: str, allows: Callable[..., bool]) -> Finding | None:
    ours = name == "octavo-client"  # on no index
    advice = "pip install -e ./proto -e . in the checkout" if ours else f"pip install '{name}{wanted}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, verdict=Verdict.BAD, detail="missing", advice=advice)
    if allows(version, prereleases=True):
        return None
    return Finding(name=name, verdict=Verdict.WARNING, detail=f"{version}, wanted {wanted}", advice=advice)


def check_torch() -> list[Finding]:
    """torch, and what it computes on."""
    try:
        import torch
    except ImportError as error:
        advice = "python deploy/install_torch.py in the checkout, which takes the build for this machine"
        return [Finding(name="torch", verdict=Verdict.BAD, detail=str(error), advice=advice)]
    found = [
        Finding(name="torch", verdict=Verdict.GOOD, detail=f"{torch.__version__}, {torch.get_num_threads()} threads")
    ]
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        verdict = Verdict.WARNING if has_driver else Verdict.GOOD
        advice = "this torch has no CUDA, or its driver is too old" if has_driver else ""
        return [*found, Finding(name="device", verdict=verdict, detail=f"CPU, {_cpu()}", advice=advice)]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found.append(Finding(name=f"cuda:{index}", verdict=Verdict.GOOD, detail=detail))
    return found


def check_memory() -> Finding:
    """Free main memory."""
    available, total = available_bytes(), psutil.virtual_memory().total
    is_good = available > 2 * GIB
    return Finding(
        name="memory",
        verdict=Verdict.GOOD if is_good else Verdict.WARNING,
        detail=f"{available / GIB:.1f} of {total / GIB:.1f} GiB available",
        advice="" if is_good else "give a small --num-blocks, or close other programs",
    )


def available_bytes() -> int:
    """Main memory as a worker counts it: a container's limit may be lower than the host's memory."""
    try:
        from octavo.worker.loading.memory import available_host_bytes
    except ImportError:  # without torch
        return int(psutil.virtual_memory().available)
    return available_host_bytes()


def check_shared_memory() -> Finding:
    """/dev/shm, which torch and CUDA use between processes."""
    if not Path("/dev/shm").is_dir():
        return Finding(name="/dev/shm", verdict=Verdict.WARNING, detail="absent", advice="only Linux has it")
    free = shutil.disk_usage("/dev/shm").free
    is_good = free >= MIN_SHM_BYTES
    return Finding(
        name="/dev/shm",
        verdict=Verdict.GOOD if is_good else Verdict.WARNING,
        detail=f"{free / GIB:.2f} GiB free",
        advice="" if is_good else "in a container: --shm-size 1g",
    )


def check_run_folder(settings: ServeSettings) -> Finding:
    """The run directory is ours alone, or can be created."""
    folder = settings.run_dir or default_run_dir()
    if not folder.exists():
        return Finding(name="run directory", verdict=Verdict.GOOD, detail=f"{folder} will be made")
    try:
        check_run_dir(folder)
    except RunDirError as error:
        advice = "mend it, or give another with --run-dir"
        return Finding(name="run directory", verdict=Verdict.BAD, detail=str(error), advice=advice)
    return Finding(name="run directory", verdict=Verdict.GOOD, detail=f"{folder} is 0700 and ours")


def check_ports(settings: ServeSettings) -> list[Finding]:
    """The addresses that `octavo serve` would listen on are this host's, and the ports are free."""
    found = []
    for host, name in listening_hosts(settings):
        try:
            require_address(host, name)
        except CliError as error:
            detail = f"{error.what}: {error.numbers}"
            found.append(Finding(name="address", verdict=Verdict.BAD, detail=detail, advice=error.change))
    if found:
        return found
    try:
        wanted = asked_ports(settings)
    except CliError as error:
        detail = f"{error.what}: {error.numbers}"
        return [Finding(name="ports", verdict=Verdict.BAD, detail=detail, advice=error.change)]
    for host, port, name in wanted:
        try:
            require_free(host, port, name)
        except CliError as error:
            found.append(Finding(name="port", verdict=Verdict.WARNING, detail=error.numbers, advice=error.change))
    free = ", ".join(str(port) for _, port, _ in wanted)
    detail = f"free: {free}" if free else "the system chooses them"
    return found or [Finding(name="ports", verdict=Verdict.GOOD, detail=detail)]


def check_certificates(settings: ServeSettings) -> list[Finding]:
    """Whether the certificates can be used, and for how long; empty without TLS."""
    name = "certificates"
    files = {CERT_FILE: settings.tls_cert_file, CLIENT_CA_FILE: settings.tls_client_ca_file}
    if not any(files.values()) and settings.tls_key_file is None:
        return []
    try:
        tls = access_config(settings).tls
        assert tls is not None
        material = load_tls(tls)
    except (AccessFileError, CliError) as error:
        return [Finding(name=name, verdict=Verdict.BAD, detail=f"{error.what}: {error.numbers}", advice=error.change)]
    found = []
    for file, end_s in expiries(material.cert, material.client_ca).items():
        left_s, day = end_s - time.time(), f"{datetime.fromtimestamp(end_s, UTC):%Y-%m-%d}"
        if left_s <= 0:
            verdict, detail = Verdict.BAD, f"{files[file]} has expired, on {day}"
        elif left_s < SOON_S:
            verdict, detail = Verdict.WARNING, f"{files[file]} expires in {left_s / 86_400:.0f} days, on {day}"
        else:
            verdict, detail = Verdict.GOOD, f"{files[file]} is valid until {day}"
        advice = "" if verdict is Verdict.GOOD else "replace the file: gateways take a new one without a restart"
        found.append(Finding(name=name, verdict=verdict, detail=detail, advice=advice))
    return found


def check_file_limit() -> Finding:
    """Each connection takes a file descriptor."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_good = soft >= 4096
    return Finding(
        name="open files",
        verdict=Verdict.GOOD if is_good else Verdict.WARNING,
        detail=f"at most {soft:,} (hard limit {hard:,})",
        advice="" if is_good else "ulimit -n 65536 before serving many clients",
    )


def check_variables() -> list[Finding]:
    """Environment variables that look like ours but are not."""
    return [
        Finding(name="environment", verdict=Verdict.WARNING, detail=f"{name} is no setting", advice=advice)
        for name, advice in unknown_variables()
    ]


def _cpu() -> str:
    flags = _cpu_flags()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    usable, there = usable_cores(), os.cpu_count() or 1
    cores = f"{there} cores" if usable >= there else f"{usable} of {there} cores, by affinity or a container's quota"
    return cores + (f", {' '.join(features)}" if features else "")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())


NAME = "instructions"


def check_cpu(settings: ServeSettings) -> list[Finding]:
    """Call before torch is imported, since the settings may hide instructions from it."""
    if settings.cpu_isa != "auto":
        os.environ[variable_of("cpu_isa")] = settings.cpu_isa
    try:
        from octavo.model.cpu.isa import cpu_isa, machine_isa
        from octavo.model.cpu.native import kernels_arithmetic, why_missing

        used, there = cpu_isa(), machine_isa()
    except ImportError as error:
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=str(error), advice="install torch first")]
    except ValueError as error:
        os.environ.pop(variable_of("cpu_isa"), None)  # the other checks look at the whole machine
        numbers, change = getattr(error, "numbers", str(error)), getattr(error, "change", "")
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=numbers, advice=change)]
    hidden = f" ({there.word} is hidden by --cpu-isa)" if used < there else ""
    if kernels := kernels_arithmetic():
        return [Finding(name=NAME, verdict=Verdict.GOOD, detail=f"{used.word}{hidden}; own kernels: {kernels}")]
    detail = f"{used.word}{hidden}; torch alone is slower: {why_missing() or 'OCTAVO_NATIVE is off'}"
    advice = "install a C compiler; OCTAVO_NATIVE must not be off"
    return [Finding(name=NAME, verdict=Verdict.WARNING, detail=detail, advice=advice)]
