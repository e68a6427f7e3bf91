"""Triton kernels, one noun a file: an obvious torch reference, the kernel, and a launcher that checks its arguments.

Importable only where triton is. Must not know: requests, who owns a block, which model sizes exist.
"""
