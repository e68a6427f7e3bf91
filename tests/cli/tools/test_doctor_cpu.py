"""What the doctor says of the CPU's instructions."""

import os

import pytest

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools import doctor_checks
from octavo.cli.tools.doctor_checks import Verdict, check_cpu
from octavo.model.cpu import isa
from octavo.model.cpu.isa import Isa


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has everything, and kernels that say one word; what the doctor sets is forgotten."""
    monkeypatch.setattr(isa, "machine_isa", lambda: Isa.AMX)
    monkeypatch.setattr("octavo.model.cpu.native.kernels_arithmetic", lambda: "word")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != isa.VARIABLE})


def test_it_names_the_class_and_what_multiplies() -> None:
    (found,) = check_cpu(ServeSettings())
    assert (found.verdict, found.detail) == (Verdict.GOOD, "amx; own kernels: word")


def test_it_says_what_is_hidden() -> None:
    (found,) = check_cpu(ServeSettings(cpu_isa="vnni"))
    assert (found.verdict, found.detail) == (Verdict.GOOD, "vnni (amx is hidden by --cpu-isa); own kernels: word")


def test_a_cpu_that_has_less_than_the_setting_is_bad_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "machine_isa", lambda: Isa.AVX2)
    (found,) = check_cpu(ServeSettings(cpu_isa="bf16"))
    assert found.verdict is Verdict.BAD
    assert found.detail == "OCTAVO_CPU_ISA is 'bf16', but this CPU has avx2"


def test_without_kernels_it_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.cpu.native.kernels_arithmetic", lambda: "")
    (found,) = check_cpu(ServeSettings())
    assert found.verdict is Verdict.WARNING
    assert "torch alone is slower" in found.detail
    assert "C compiler" in found.advice


@pytest.mark.parametrize(
    ("usable", "told"), [(2, "2 of 64 cores, by affinity or a container's quota"), (64, "64 cores")]
)
def test_the_cores_that_a_container_leaves_are_told(usable: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(doctor_checks, "usable_cores", lambda: usable, raising=False)
    monkeypatch.setattr(doctor_checks, "_cpu_flags", set)
    assert doctor_checks._cpu() == told


def test_the_memory_that_a_container_leaves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.loading.memory.available_host_bytes", lambda: 1 << 30)
    found = doctor_checks.check_memory()
    assert (found.verdict, found.detail.partition(" of ")[0]) == (Verdict.WARNING, "1.0")
