"""Checks, without a GPU, the kernels of a start on one: runs the checks of compiled.py and fitting.py.

TRITON_INTERPRET=0 python -m tests.support.worker.kernels_known
"""

from triton.runtime.cache import triton_key

from tests.support.forks import serve
from tests.support.worker.compiled import tell_late
from tests.support.worker.fitting import tell_faults

TOLD = {each.__name__: each for each in (tell_late, tell_faults)}


def tell(name: str, *arguments: str) -> None:
    """Run the check of this name."""
    TOLD[name](*arguments)


if __name__ == "__main__":
    triton_key()  # hashes all of Triton, which otherwise takes each fork a second
    serve(tell)
