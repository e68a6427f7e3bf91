"""Kernels for CPUs in C, compiled on the machine that they run on. Everything works without them, but more slowly."""
