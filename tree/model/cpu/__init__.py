"""Kernels for CPUs in C, compiled on the machine that they run on; everything works without them, slower."""
