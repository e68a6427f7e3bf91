"""Kernels written in CUDA C++: compiled by the library that torch's builds for CUDA bring (NVRTC), once for a machine,
and launched. For what triton has no words for: tiles that are no powers of two, clusters of programs.

What is compiled is kept on disk under the hash of the source, the compiler and the device's architecture. The compiler
runs in threads, so that a start that knows its kernels lets all of them be compiled beside each other.

Must not know: any particular kernel.
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from octavo.model.cache_folder import cache_folder
from octavo.model.kernels.overlap import Overlap

_OPTIONS = ("--std=c++17", "-default-device")
_COMPILERS = ThreadPoolExecutor(os.cpu_count() or 1, "nvrtc")
_ROW_BYTES = 128
"""What a copy brings of a row, spread over the banks of shared memory."""


class CudaError(RuntimeError):
    """What the driver or the compiler says."""


@cache
def has_compiler() -> bool:
    """Whether there is a compiler, and what talks to it and to the driver."""
    if find_spec("cuda") is None:
        return False
    with suppress(Exception):  # a library that cannot be loaded says so in several ways
        _compiler_version()
        return True
    return False


class CudaKernel:
    """A kernel of a source. Immutable but for what is compiled. name: the function's, behind its module's below this
    folder. shared_bytes: of dynamic shared memory."""

    def __init__(self, source: str, name: str, *, num_threads: int, shared_bytes: int) -> None:
        self.name, self.shared_bytes = name, shared_bytes
        self._source, self._num_threads = source, num_threads
        self._functions: dict[int, Any] = {}
        self._image: Future[bytes] | None = None

    def launch(
        self, num_programs: int, arguments: Sequence[tuple[Any, type | None]], overlap: Overlap = Overlap.NONE
    ) -> None:
        """Enqueue so many programs on torch's current stream. arguments: values and their kinds of ctypes; None for a
        `TensorMap`. Raises CudaError."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._num_threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if overlap is Overlap.DEPENDENT:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, kinds = zip(*arguments, strict=True)
        _checked(driver.cuLaunchKernelEx(config, self._function(), (values, kinds), 0))

    def begin_compiling(self) -> Future[bytes]:
        """In a thread, for the current device: the image, or CudaError with what the compiler says."""
        if self._image is None:
            major, minor = torch.cuda.get_device_capability()
            self._image = _COMPILERS.submit(compile_source, self._source, f"sm_{major}{minor}a")
        return self._image

    def _function(self) -> Any:
        device = torch.cuda.current_device()
        if device not in self._functions:
            from cuda.bindings import driver

            module = _checked(driver.cuModuleLoadData(self.begin_compiling().result()))
            function = _checked(driver.cuModuleGetFunction(module, self.name.rpartition(".")[2].encode()))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, most, self.shared_bytes))
            self._functions[device] = function
        return self._functions[device]


class TensorMap:
    """What a matrix looks like to the copy engine: rows of 16-bit numbers, of which it brings so many at once, 64
    numbers of each. Where the matrix has three dimensions, so many rows of each of the first."""

    def __init__(self, matrix: torch.Tensor, num_rows: int) -> None:
        """Raises CudaError where the driver refuses it: rows are to begin at multiples of 16 bytes."""
        self._room = (ctypes.c_char * 192)()
        self._at = -(-ctypes.addressof(self._room) // 64) * 64
        sizes, strides = matrix.shape[::-1], matrix.stride()[::-1]
        rank = len(sizes)
        box = [_ROW_BYTES // 2, num_rows, *sizes[2:]]
        error = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self._at),
            9 if matrix.dtype == torch.bfloat16 else 6,  # the driver's names of bfloat16 and float16
            rank,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * rank)(*(2 * stride for stride in strides[1:])),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleaving
            3,  # swizzled in 128 bytes
            3,  # by 256 bytes into the second-level cache
            0,  # zeros beyond the matrix
        )
        if error:
            raise CudaError(f"the driver refuses copies of {tuple(matrix.shape)} by {num_rows} rows ({error})")

    def getPtr(self) -> int:
        """Where it is: what cuda.bindings asks an argument for."""
        return self._at


def compile_source(source: str, arch: str) -> bytes:
    """The image of a source, from disk or the compiler. Raises CudaError with what the compiler says."""
    key = "\0".join([source, arch, *_OPTIONS, str(_compiler_version())])
    file = cache_folder("cuda") / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.cubin"
    with suppress(OSError):
        return file.read_bytes()
    image, _ = run_compiler(source, arch)
    with suppress(OSError):  # a folder that cannot be written only costs the next start its time
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(image)
        unfinished.replace(file)
    return image


def run_compiler(source: str, arch: str, *more: str) -> tuple[bytes, str]:
    """The image of a source, with these options beside our own, and what the compiler says. Raises CudaError."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in (*_OPTIONS, f"-arch={arch}", *more)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    told = _room(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, told))
    text = told.decode(errors="replace").strip("\0 \n")
    if error.value:
        raise CudaError(f"the compiler says: {text}")
    num_bytes = _checked(nvrtc.nvrtcGetCUBINSize(program))
    image = _room(num_bytes)
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image[:num_bytes], text


def _room(num_bytes: int) -> bytes:
    """Bytes that may be written over: of a single one Python has an object that all share, an empty log's."""
    return bytes(num_bytes + 1)


@cache
def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error.value:
        raise CudaError(f"{error.name} from the compiler")
    return major, minor


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call gives beside its error. Raises CudaError."""
    error, *given = result
    if error.value:
        raise CudaError(f"{error.name} from the driver")
    return given[0] if given else None
