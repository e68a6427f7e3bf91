"""Names that differ between the releases of triton whose Gluon the kernels are written in: the language is experimental
and changes."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

KNOWN_VERSIONS = ("3.6.", "3.7.")
"""Releases with which the kernels compile as intended (tests/model/kernels)."""

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
