"""Finds, without a GPU, kernels that a start on a Hopper GPU launches without having compiled them in parallel before.

Tensors are in host memory and claim to be on a device. A launch does nothing but record what Triton would compile for
it, or the source of a CUDA C++ kernel; library products are left out. Each case runs in a fork of kernels_known.py's
process, since it changes the process. Prints a line for each kernel that comes too late, and for each that a helper
process would store elsewhere on disk, then the number of kernels that came in time.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import triton
import triton.runtime
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.cpu import native
from octavo.model.gpu import autotune
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels import precompile
from octavo.model.kernels.cuda_source import CudaKernel
from octavo.model.kernels.products import clustered
from octavo.model.kernels.products.hopper import ProductTrial
from octavo.model.layers.linear import WeightFormat
from octavo.worker.config import Deterministic
from octavo.worker.loading.compilers import CompilerProcesses
from octavo.worker.loading.warmup import warm_up
from octavo.worker.runners.cuda import graph_runner, loading, memory
from octavo.worker.runners.cuda.graph_runner import Autotune, CudaRunnerConfig
from octavo.worker.runners.cuda.runner import CudaRunner
from tests.support.model.pretended import PretendedDriver

HEADS_OF_64 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 1280, "num_hidden_layers": 3,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
HEADS_OF_128 = HEADS_OF_64 | {"hidden_size": 1024, "num_attention_heads": 8, "tie_word_embeddings": False}
CASES: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "heads of 128": {"shape": HEADS_OF_128},
    "heads with norms": {"shape": HEADS_OF_128 | {"model_type": "qwen3", "head_dim": 128}},
    "fp8 weights": {"weights": WeightFormat.FP8},
    "int8 weights": {"weights": WeightFormat.INT8},
    "fp8 cache": {"kv_dtype": torch.float8_e4m3fn},
    "deterministic": {"deterministic": Deterministic.ON},
}
BLOCK_SIZE, NUM_BLOCKS = 16, 300
NUM_HELPERS = 2


class Recorder:
    """Runs the work that would be recorded as a graph."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


class Listener(Protocol):
    """Is told of each launched kernel once."""

    def note(
        self, kernel: Any, signature: Any, constexprs: Any, options: Any, attrs: Any, target: GPUTarget
    ) -> None: ...


def pretend(
    listener: Listener, *, capability: tuple[int, int] = (9, 0), shared_bytes: int = 227 << 10
) -> set[tuple[str, str]]:
    """Pretend that this process has such a device. Returns a set to which every kernel launched from now on is added,
    by name and key. shared_bytes: shared memory that a thread block may have."""
    launched: set[tuple[str, str]] = set()

    def note(
        kernel: JITFunction,
        key: str,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warm: bool,
    ) -> None:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if (name, key) not in launched:
            launched.add((name, key))
            kernels, _, target, *_ = kernel.device_caches[device]
            listener.note(kernel, signature, constexprs, options, attrs, target)
            kernels[key] = nothing  # further launches do not ask for it

    def note_cuda(kernel: CudaKernel, *arguments: Any) -> None:
        source = hashlib.sha256(kernel._source.encode()).hexdigest()
        launched.add((kernel.name, source))

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a start on a GPU compiles the kernels for CPUs: seconds for nothing")

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, pin_memory=False, **named: make(*arguments, **named)

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype) if out is None else out

    triton.runtime.driver.set_active(PretendedDriver(capability))
    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, shared_memory_per_block_optin=shared_bytes
    )
    nothing = mock.MagicMock()
    nothing.elapsed_time.return_value = 1.0
    for place, name, value in (
        (JITFunction, "_do_compile", note),
        (torch.Tensor, "is_cuda", property(lambda tensor: True)),
        (torch.Tensor, "is_cpu", property(lambda tensor: False)),
        (native, "_compiled", refuse),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_name", lambda device=None: "none"),
        (torch.cuda, "mem_get_info", lambda device=None: (60 << 30, 80 << 30)),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "Event", lambda **named: nothing),
        (torch.cuda, "Stream", lambda *arguments: nothing),
        (torch.cuda, "current_stream", lambda *arguments: nothing),
        *((torch, name, unpinned(getattr(torch, name))) for name in ("zeros_like", "empty_like", "zeros", "empty")),
        (torch, "mm", product),
        (torch, "_scaled_mm", lambda a, b, *rest, out=None, **named: out if out is not None else product(a, b)),
        (torch.Tensor, "__matmul__", product),
        (torch.Tensor, "addmm_", lambda tensor, a, b: tensor),
        (ProductTrial, "_try", lambda trial, device: trial.run(device) is not None),
        (clustered._TRIAL, "_try", lambda device: True),
        (clustered, "has_compiler", lambda: True),
        (clustered, "TensorMap", lambda *arguments: None),
        (CudaKernel, "begin_compiling", note_cuda),
        (CudaKernel, "launch", note_cuda),
        (autotune, "time_graph", lambda work, stream=None, steps=1: (work(), 1.0)[1]),
        (autotune, "write_names", lambda file, names: None),
        (autotune, "read_names", lambda file: {}),
        (graph_runner, "GraphRecorder", Recorder),
        (memory, "GraphRecorder", Recorder),
        (loading, "compiling", lambda on_progress, **named: mock.patch.object(precompile, "_compiling", True)),
    ):
        setattr(place, name, value)
    return launched


class Places:
    """Where Triton would store each kernel: according to this process, which hashes kernels as they are launched, and
    to helper processes, which get them in any order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = set[str]()
        self._unasked = list[str]()
        helpers = CompilerProcesses.fork(NUM_HELPERS, wake=lambda: None, answer=self._answer)
        assert helpers is not None
        self._helpers = helpers
        self._others = ThreadPoolExecutor(NUM_HELPERS)

    def note(self, kernel: Any, signature: Any, constexprs: Any, options: Any, attrs: Any, target: Any) -> None:
        """Record a kernel that is launched."""
        self._own.add(place(kernel.ASTSource(kernel, signature, constexprs, attrs), target, options.__dict__))
        request = precompile.Request(kernel, signature, constexprs, attrs, dict(options.__dict__), target)
        packed = request.packed()
        if packed is None:
            self._unasked.append(kernel.fn.__name__)
        else:
            self._others.submit(self._helpers.ask, packed)

    def differences(self) -> list[str]:
        """The differences in words, once all kernels have been launched."""
        self._others.shutdown()
        self._helpers.close()
        theirs = {line for file in self._folder.iterdir() for line in file.read_text().splitlines()}
        unasked = [f"{name} cannot be told to another process" for name in self._unasked]
        return unasked + [f"{key} is what one alone says" for key in sorted(theirs ^ self._own)]

    def _answer(self, request: bytes) -> None:
        def tell(source: Any, *, target: Any, options: Any) -> None:
            with (self._folder / str(os.getpid())).open("a") as file:
                file.write(place(source, target, options) + "\n")

        with mock.patch.object(triton, "compile", tell):
            precompile.help_compiling(request)


def place(source: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """The kernel's name, and its key in Triton's cache."""
    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(dict(options)), {})
    return f"{source.name} {hashlib.sha256(key.encode()).hexdigest()[:12]}"


def start(
    launched: set[tuple[str, str]],
    *,
    shape: dict[str, Any] = HEADS_OF_64,
    weights: WeightFormat = WeightFormat.BF16,
    kv_dtype: torch.dtype | None = None,
    deterministic: Deterministic = Deterministic.OFF,
    dtype: torch.dtype = torch.bfloat16,
) -> set[tuple[str, str]]:
    """Start as worker/runners/cuda/loading.py does. Returns the kernels that the first part of the start compiles."""
    model = CausalLM(ModelConfig.from_dict(shape), dtype=dtype, device="cpu")
    config = CudaRunnerConfig(
        num_blocks=1, block_size=BLOCK_SIZE, max_slots=256, max_model_len=4000, vocab_size=2000, max_batch_tokens=4096,
        autotune=Autotune.MEASURED, deterministic=deterministic, kv_dtype=kv_dtype,
    )  # fmt: skip
    taken = GpuWeights.take(model, max_positions=config.table_width * BLOCK_SIZE, weight_format=weights)
    loading.compile_kernels(taken, config)
    compiled = set(launched)
    memory.cuda_memory_needs(taken, config, weights_bytes=1, memory_fraction=0.9)
    row_bytes = kv_block_bytes(taken.config, block_size=BLOCK_SIZE, dtype=kv_dtype or taken.dtype)
    host = HostBlocks(8, row_bytes, is_pinned=False)
    runner = CudaRunner(taken, replace(config, num_blocks=NUM_BLOCKS), host_blocks=host)
    runner.record()
    warm_up(runner, max_batch_tokens=config.max_batch_tokens)
    runner.measure_copies()
    return compiled


def tell_late(case: str) -> None:
    """See the module."""
    with TemporaryDirectory() as folder:
        places = Places(Path(folder))
        launched = pretend(places)
        np.random.seed(0)
        compiled = start(launched, **CASES[case])
        sys.stdout.writelines(f"{name} {key}\n" for name, key in sorted(launched - compiled))
        sys.stdout.writelines(f"{each}\n" for each in places.differences())
    sys.stdout.write(f"{len(compiled)}\n")
