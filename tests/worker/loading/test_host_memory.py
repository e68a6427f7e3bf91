"""How much host memory is taken for blocks: by default, as asked for, and what is refused in which words."""

from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread

import pytest
import torch

from octavo.model.attention.host_blocks import HostBlocks, HostMemoryRefused
from octavo.worker.loading import host_memory
from octavo.worker.loading.host_memory import (
    allocate_host_blocks,
    begin_host_blocks,
    cpus_beside,
    host_blocks_wanted,
    near,
    parse_cpus,
)
from octavo.worker.loading.memory import GIB, MOST_BLOCKS, DoesNotFit, MemoryNeeds, SpareMemory, size_pool

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 GiB are free."""
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 32 * GIB)


def test_a_gpu_takes_a_share_that_all_of_the_host_divide_and_a_cpu_none() -> None:
    assert host_blocks_wanted(None, MIB, num_gpus=1) == 8 * 1024
    assert host_blocks_wanted(None, MIB, num_gpus=8) == 1024
    assert host_blocks_wanted(None, MIB, num_gpus=0) == 0


def test_nobody_who_did_not_ask_waits_for_more_than_16_gib_to_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1024 * GIB)
    assert host_blocks_wanted(None, MIB, num_gpus=1) == 16 * 1024
    assert host_blocks_wanted(500, MIB, num_gpus=1) == 500 * 1024


def test_what_is_asked_for_is_taken_and_nothing_is_nothing() -> None:
    assert host_blocks_wanted(1.5, MIB, num_gpus=0) == 1536
    assert host_blocks_wanted(0, MIB, num_gpus=4) == 0


def test_more_than_the_machine_has_is_refused_in_a_sentence_with_what_would_do() -> None:
    with pytest.raises(DoesNotFit) as refused:
        host_blocks_wanted(33, MIB, num_gpus=1)
    assert refused.value.what == "33 GiB of host memory for KV blocks are more than this machine has free"
    assert "--host-kv-gib is 33, free are 32.00 GiB" in refused.value.numbers
    assert refused.value.change == "try --host-kv-gib 8, or 0 for none"


def test_ranks_are_told_of_what_was_asked_for_and_not_of_a_part_of_it() -> None:
    """The host's memory is that of all of them: two parts of 20 GiB are not there, though one is."""
    assert host_blocks_wanted(2, MIB, num_gpus=2, num_ranks=2) == 1024
    for asked, numbers in (
        (40, r"--host-kv-gib is 40, free are 32\.00 GiB"),
        (0.0015, r"--host-kv-gib is 0\.0015 \(1,610,612 bytes\), a block takes 2,097,152 bytes"),
    ):
        with pytest.raises(DoesNotFit, match=numbers):
            host_blocks_wanted(asked, MIB, num_gpus=0, num_ranks=2)


def test_less_than_a_block_is_refused_in_a_sentence_with_what_would_do() -> None:
    with pytest.raises(DoesNotFit) as refused:
        host_blocks_wanted(0.0001, MIB, num_gpus=1)
    assert refused.value.what == "the host memory for KV blocks is smaller than one block"
    least = float(refused.value.change.split()[2])
    assert host_blocks_wanted(least, MIB, num_gpus=1) >= 1


def refuse(self: HostBlocks, num_rows: int) -> torch.Tensor:
    raise HostMemoryRefused("no more pages can be locked")


def test_memory_that_the_system_refuses_ends_the_start_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlocks, "_allocate", refuse)
    with pytest.raises(DoesNotFit, match=r"the system refuses 1\.00 GiB of host memory") as refused:
        allocate_host_blocks(1, MIB, CPU, lambda done, total: None)
    assert refused.value.numbers == "no more pages can be locked"


def test_where_nobody_asked_the_start_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlocks, "_allocate", refuse)
    monkeypatch.setattr(host_memory, "host_blocks_wanted", lambda *_, **__: 4)
    assert allocate_host_blocks(None, MIB, CPU, lambda done, total: None) is None


def test_progress_is_told_and_none_is_none() -> None:
    told: list[tuple[int, int]] = []
    host = allocate_host_blocks(0.01, MIB, CPU, lambda done, total: told.append((done, total)))
    assert host is not None
    assert (host.num_blocks, host.is_pinned, told) == (10, False, [(0, 1), (1, 1)])
    assert allocate_host_blocks(0, MIB, CPU, lambda done, total: None) is None


def test_the_memory_is_touched_by_another_thread_while_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, by = Event(), list[str]()

    def allocate(self: HostBlocks, num_rows: int) -> torch.Tensor:
        by.append(current_thread().name)
        assert goes_on.wait(60)
        return torch.zeros((num_rows, self.row_bytes), dtype=torch.uint8)

    monkeypatch.setattr(HostBlocks, "_allocate", allocate)
    coming = begin_host_blocks(0.01, MIB, CPU)
    goes_on.set()  # what follows begin_host_blocks in a start: kernels are compiled
    host = coming.take(lambda done, total: None)
    assert host is not None
    assert host.num_blocks == 10
    assert by == ["host-memory"]


def test_the_cpus_beside_a_device_are_read_as_the_kernel_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8\n")
    properties = type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert cpus_beside(torch.device("cuda"), tmp_path) == {0, 1, 2, 8}
    assert cpus_beside(torch.device("cuda"), tmp_path / "none") == set()
    assert cpus_beside(CPU, tmp_path) == set()
    assert parse_cpus("") == set()
    with near(CPU):
        pass


def test_a_gpu_gives_spare_memory_to_cached_prefixes() -> None:
    needs = MemoryNeeds(
        available_bytes=8 * GIB,
        weights_bytes=GIB,
        activation_bytes=GIB,
        reserve_bytes=0,
        block_bytes=MIB,
        block_size=16,
        max_model_len=1024,
        max_num_seqs=2,
        memory_fraction=1.0,
    )
    assert size_pool(needs) == 2 * 64
    assert size_pool(replace(needs, spare=SpareMemory.TAKEN)) == 7 * 1024
    tiny = replace(needs, block_bytes=256, spare=SpareMemory.TAKEN)
    assert size_pool(tiny) == MOST_BLOCKS
    assert host_blocks_wanted(None, 1024, num_gpus=1) == host_memory.MOST_UNASKED_BLOCKS


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("device_gib", [16, 24, 40, 80, 141, 192, 288])
@pytest.mark.parametrize(
    ("block_bytes", "weights_gib"), [(81_920, 0.1), (98_304, 0.9), (196_608, 0.9), (917_504, 14.0)]
)
def test_the_pool_takes_what_the_fraction_promises_of_any_device(
    device_gib: int, block_bytes: int, weights_gib: float, fraction: float
) -> None:
    """The embedded model in float32, Qwen2.5-0.5B with an fp8 and a bf16 cache, 7B; 4 requests to 4,096."""
    if weights_gib > 0.8 * fraction * device_gib:
        return  # the weights alone take it
    available = device_gib * GIB - int(weights_gib * GIB)
    for max_num_seqs, max_model_len in ((4, 256), (256, 32_768), (4096, 2048)):
        needs = MemoryNeeds(
            available_bytes=available,
            weights_bytes=int(weights_gib * GIB),
            activation_bytes=GIB // 2,
            block_bytes=block_bytes,
            block_size=16,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            memory_fraction=fraction,
            spare=SpareMemory.TAKEN,
        )
        taken = size_pool(needs) * block_bytes + needs.fixed_bytes
        assert needs.budget_bytes - block_bytes < taken <= needs.budget_bytes


@pytest.mark.parametrize("device_gib", range(80, 289, 16))
@pytest.mark.parametrize("activation_gib", [0.2, 4])
def test_half_of_a_large_device_is_taken_for_the_smallest_blocks(device_gib: int, activation_gib: float) -> None:
    """What tests/gpu/test_cuda_loading.py asks of the device it runs on, for the embedded model in float32. What is
    accounted for may be less than what is taken by no more than the reserve."""
    weights_bytes, activation_bytes = GIB // 10, int(activation_gib * GIB)
    needs = MemoryNeeds(
        available_bytes=device_gib * GIB - weights_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        block_bytes=81_920,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=4096,
        memory_fraction=0.5,
        spare=SpareMemory.TAKEN,
    )
    num_blocks = size_pool(needs)
    taken = num_blocks * needs.block_bytes + weights_bytes + activation_bytes
    assert 0.40 * device_gib * GIB < taken
    assert taken + needs.reserve_bytes < 0.52 * device_gib * GIB
    assert num_blocks < MOST_BLOCKS
