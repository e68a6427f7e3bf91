"""A fake GPU driver, as far as Triton asks it."""

from triton.backends.compiler import GPUTarget


class PretendedDriver:
    """Has one device, a Hopper GPU unless another compute capability is given, and its first stream."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self._arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
