"""Steps of a model on a GPU: weights as the kernels need them, state that stays on the device, decode and mixed steps.

Can only be imported if triton is installed. Must not know: requests, who owns a block, sockets.
"""
