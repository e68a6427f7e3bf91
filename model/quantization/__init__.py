"""Weights of fewer bits: how checkpoints say it, how they pack it, and what it is in numbers.

Everything here is plain torch and slow; the kernels that multiply with such weights are in model/kernels/products and
model/cpu.
Must not know: layers, files, devices' kernels.
"""
