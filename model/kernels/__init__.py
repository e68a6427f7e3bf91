"""Triton kernels, one noun per file: an obvious torch reference, the kernel, and a launcher that checks its arguments.

Can only be imported if triton is installed. Must not know: requests, who owns a block, which model sizes exist.
"""
