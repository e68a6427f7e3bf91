"""Compiles and launches kernels written in CUDA C++, for what triton cannot express: tiles that are not powers of two,
clusters of thread blocks. They are compiled once per machine by NVRTC, which comes with torch's builds for CUDA.

Images are kept on disk under the hash of the source, the compiler and the device's architecture. The compiler runs in
threads, so that a start that knows its kernels can compile all of them in parallel.

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
"""Bytes of a row per copy, swizzled over the banks of shared memory."""


class CudaError(RuntimeError):
    """An error of the driver or the compiler."""


@cache
def has_compiler() -> bool:
    """Whether the compiler and the bindings to it and to the driver are available."""
    if find_spec("cuda") is None:
        return False
    with suppress(Exception):  # a library that cannot be loaded raises different exceptions
        _compiler_version()
        return True
    return False


class CudaKernel:
    """A kernel in a source. Immutable except for what has been compiled. name: the function's, after its module's name
    below this folder. shared_bytes: of dynamic shared memory."""

    def __init__(self, source: str, name: str, *, num_threads: int, shared_bytes: int) -> None:
        self.name, self.shared_bytes = name, shared_bytes
        self._source, self._num_threads = source, num_threads
        self._functions: dict[int, Any] = {}
        self._image: Future[bytes] | None = None

    def launch(
        self, num_programs: int, arguments: Sequence[tuple[Any, type | None]], overlap: Overlap = Overlap.NONE
    ) -> None:
        """Enqueue num_programs thread blocks on torch's current stream. arguments: (value, ctypes type), None as type
        for a `TensorMap`. Raises CudaError."""
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
        """Compile for the current device, in a thread. The future has the image, or CudaError with the compiler's
        message."""
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
    """Descriptor of a matrix for TMA: rows of 16-bit numbers, of which a copy takes num_rows at once, 64 numbers of
    each. If the matrix has three dimensions, num_rows rows for each index of the first."""

    def __init__(self, matrix: torch.Tensor, num_rows: int) -> None:
        """Raises CudaError if the driver refuses it: rows must begin at multiples of 16 bytes."""
        self._room = (ctypes.c_char * 192)()
        self._at = -(-ctypes.addressof(self._room) // 64) * 64
        sizes, strides = matrix.shape[::-1], matrix.stride()[::-1]
        rank = len(sizes)
        box = [_ROW_BYTES // 2, num_rows, *sizes[2:]]
        error = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self._at),
            9 if matrix.dtype == torch.bfloat16 else 6,  # the driver's numbers for bfloat16 and float16
            rank,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * rank)(*(2 * stride for stride in strides[1:])),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleaving
            3,  # 128-byte swizzle
            3,  # 256 bytes at a time into the L2 cache
            0,  # zeros beyond the matrix
        )
        if error:
            raise CudaError(f"the driver refuses copies of {tuple(matrix.shape)} by {num_rows} rows ({error})")

    def getPtr(self) -> int:
        """Its address; cuda.bindings calls this for arguments."""
        return self._at


def compile_source(source: str, arch: str) -> bytes:
    """The image of a source, from disk or the compiler. Raises CudaError with the compiler's message."""
    key = "\0".join([source, arch, *_OPTIONS, str(_compiler_version())])
    file = cache_folder("cuda") / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.cubin"
    with suppress(OSError):
        return file.read_bytes()
    image, _ = run_compiler(source, arch)
    with suppress(OSError):  # if the folder is not writable, the next start compiles again
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(image)
        unfinished.replace(file)
    return image


def run_compiler(source: str, arch: str, *more: str) -> tuple[bytes, str]:
    """The image of a source, compiled with these options in addition to our own, and the compiler's log. Raises
    CudaError."""
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
    """Bytes that may be overwritten. One more than needed: Python shares objects of a single byte (an empty log has
    one)."""
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
    """The first result of a call after its error code, if any. Raises CudaError."""
    error, *given = result
    if error.value:
        raise CudaError(f"{error.name} from the driver")
    return given[0] if given else None
