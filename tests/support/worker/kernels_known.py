"""The program that tells, without a GPU, about the kernels of a start on one: what compiled.py and fitting.py tell.

TRITON_INTERPRET=0 python -m tests.support.worker.kernels_known
"""

from triton.runtime.cache import triton_key

from tests.support.forks import serve
from tests.support.worker.compiled import tell_late
from tests.support.worker.fitting import tell_faults

TOLD = {each.__name__: each for each in (tell_late, tell_faults)}


def tell(name: str, *arguments: str) -> None:
    """One of those."""
    TOLD[name](*arguments)


if __name__ == "__main__":
    triton_key()  # of all that is Triton, which takes each fork a second otherwise
    serve(tell)
