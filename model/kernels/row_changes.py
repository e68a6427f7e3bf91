"""What the host changed since the last step, written into the rows' state by one small kernel.

All state of the rows lies in one buffer of 32-bit words (model/gpu/state.py), so a change is an index and a value,
whatever it means: a new block, a new temperature, another row in the batch.

    upload_U   | count | first | - | - | payload ... | index x count | value x count |
                                                     first

The kernel sets the count to zero, so that a step to which nothing was sent (a replayed graph) changes nothing.

Legend: U words of the upload · W words of the state.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

HEADER_WORDS = 4
LANES = 1024


def apply_changes_reference(upload_U: torch.Tensor, words_W: torch.Tensor) -> None:
    """The obvious reference."""
    count, first = upload_U[:2].tolist()
    for i in range(count):
        words_W[upload_U[first + i]] = upload_U[first + count + i]
    upload_U[0] = 0


@triton.jit
def _apply_changes_kernel(upload_U, words_W, LANES: tl.constexpr):
    count = tl.load(upload_U)
    index = upload_U + tl.load(upload_U + 1)
    lane = tl.arange(0, LANES)
    for start in range(0, count, LANES):
        i = start + lane
        has = i < count
        at = tl.load(index + i, mask=has, other=0)
        value = tl.load(index + count + i, mask=has, other=0)
        tl.store(words_W + at, value, mask=has)
    # Every thread has read the count before it goes.
    tl.debug_barrier()
    tl.store(upload_U, 0)


def apply_changes(upload_U: torch.Tensor, words_W: torch.Tensor) -> None:
    """words_W[index] = value for every change of the upload, whose count becomes zero. Both int32 and contiguous.

    Of changes to one word, any one may win: send equal values. Raises ValueError where a tensor does not fit.
    """
    check_tensor("upload_U", upload_U, shape=(None,), dtype=torch.int32)
    check_tensor("words_W", words_W, shape=(None,), dtype=torch.int32)
    _apply_changes_kernel[(1,)](upload_U, words_W, LANES=LANES, num_warps=8)
