"""A Hopper GPU, as far as Triton asks a driver for one."""

from triton.backends.compiler import GPUTarget


class HopperDriver:
    """Has one device and its first stream."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
