"""The C kernels on a CPU of another architecture: cross-compiled, emulated, and called like a library.

Needs a cross compiler and qemu's user mode emulation; Debian: gcc-aarch64-linux-gnu, qemu-user.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.model.cpu import native

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_NAME_BYTES, _WORD = 32, struct.Struct("<q")
_DRIVER = Path(__file__).with_name("foreign.c")
_data_ptr = torch.Tensor.data_ptr


def why_not() -> str | None:
    """What is missing; None if AArch64 kernels can be run."""
    missing = [each for each in (COMPILER, EMULATOR) if shutil.which(each) is None]
    return f"no {' and no '.join(missing)} here (Debian: gcc-aarch64-linux-gnu, qemu-user)" if missing else None


def compiled(folder: Path, *flags: str) -> Path:
    """The kernels and the program that runs them, compiled for AArch64. Raises CalledProcessError."""
    program = folder / "kernels"
    command = [COMPILER, *(flag for flag in native._FLAGS if flag not in ("-shared", "-fPIC")), "-static", *flags]
    sources = [str(each) for each in (_DRIVER, *native.SOURCES)]
    subprocess.run([*command, "-o", str(program), *sources, "-lm"], check=True, capture_output=True, timeout=240)
    return program


class ForeignLibrary:
    """Takes the same calls as a `ctypes.CDLL` of the kernels. Addresses, also inside structures, must be those of
    tensors whose `data_ptr` went through `seen`."""

    def __init__(self, program: Path) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._process = subprocess.Popen(
            [EMULATOR, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"QEMU_CPU": "max"},
        )

    def seen(self, tensor: torch.Tensor) -> int:
        """Replaces `torch.Tensor.data_ptr`: remembers the address, and keeps the tensor alive."""
        address = _data_ptr(tensor)
        self._tensors[address] = tensor
        return address

    def close(self) -> None:
        """End the emulator."""
        self._process.communicate(timeout=60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in native._SIGNATURES:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        tensors: list[torch.Tensor | bytes] = []
        pointers: list[tuple[int, int, int]] = []
        words, scale = [], 0.0

        def buffer_of(each: torch.Tensor | bytes) -> int:
            tensors.append(each)
            return len(tensors) - 1

        for each in arguments:
            if isinstance(each, float):
                scale = each
            elif isinstance(each, int):
                tensor = self._tensors.get(each)
                words.append(each if tensor is None else -1 - buffer_of(tensor))
            else:  # byref of a structure
                content = bytes(each._obj)
                index = buffer_of(content)
                words.append(-1 - index)
                for place in range(0, len(content) - 7, 8):
                    tensor = self._tensors.get(int.from_bytes(content[place : place + 8], "little"))
                    if tensor is not None:
                        pointers.append((index, place, buffer_of(tensor)))
        frame = [name.encode().ljust(_NAME_BYTES, b"\0"), struct.pack("<f", scale)]
        frame += [_WORD.pack(each) for each in (len(words), len(tensors), len(pointers), *words)]
        sizes = [len(each) if isinstance(each, bytes) else _reach(each) for each in tensors]
        for each, size in zip(tensors, sizes, strict=True):
            content = each if isinstance(each, bytes) else ctypes.string_at(_data_ptr(each), size)
            frame += [_WORD.pack(size), content]
        frame += [_WORD.pack(number) for pointer in pointers for number in pointer]
        return self._answer(name, b"".join(frame), tensors, sizes)

    def _answer(self, name: str, frame: bytes, tensors: list[torch.Tensor | bytes], sizes: list[int]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(frame)
        stdin.flush()
        found = _WORD.unpack(stdout.read(_WORD.size))[0]
        if native._SIGNATURES[name][1] is ctypes.c_char_p:
            return stdout.read(found)
        for each, size in zip(tensors, sizes, strict=True):
            content = stdout.read(size)
            if not isinstance(each, bytes):
                ctypes.memmove(_data_ptr(each), content, size)
        return ctypes.c_int(found).value


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element through its last, since kernels use strides."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
