"""Qwen2.5's steps on a GPU: weights as the kernels want them, state that stays on the device, decode and mixed steps.

Importable only where triton is. Must not know: requests, who owns a block, sockets.
"""
