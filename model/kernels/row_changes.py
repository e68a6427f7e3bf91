"""Exchange between the host and a step: changes, which a small kernel writes to the rows' state, and results, which
another kernel writes to host memory.

All state of the rows is in one buffer of 32-bit words (model/gpu/state.py), so a change is an index and a value,
whatever it means: a new block, a new temperature, another row in the batch.

    upload_U   | count | first | - | - | payload ... | index x count | value x count |
                                                     first

The kernel resets the count to zero, so that a step to which nothing was sent (a replayed graph) changes nothing.

Results are a few hundred bytes. A copy of them would wait for the device's copy engine, and the next step for the copy:
twice the time of a kernel that writes them over the link.

Legend: U words of the upload · W words of the state · Y bytes of results.
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
    # Every thread must have read the count before it is reset.
    tl.debug_barrier()
    tl.store(upload_U, 0)


def apply_changes(upload_U: torch.Tensor, words_W: torch.Tensor) -> None:
    """words_W[index] = value for every change of the upload, whose count is reset to zero. Both int32 and contiguous.

    If several changes are to one word, any of them may win: send equal values. Raises ValueError if a tensor does not
    fit.
    """
    check_tensor("upload_U", upload_U, shape=(None,), dtype=torch.int32)
    check_tensor("words_W", words_W, shape=(None,), dtype=torch.int32)
    _apply_changes_kernel[(1,)](upload_U, words_W, LANES=LANES, num_warps=8)


@triton.jit
def _send_result_kernel(result_Y, host_Y, count, LANES: tl.constexpr):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    has = i < count
    tl.store(host_Y + i, tl.load(result_Y + i, mask=has), mask=has)


def send_result(result_Y: torch.Tensor, host_Y: torch.Tensor) -> None:
    """Copy result_Y to host_Y, which is in host memory, pinned if results are on a device. Both uint8. The copy is done
    when the launch has ended, for callers that wait for that.

    Raises ValueError if a tensor does not fit.
    """
    check_tensor("result_Y", result_Y, shape=(None,), dtype=torch.uint8)
    check_tensor("host_Y", host_Y, shape=tuple(result_Y.shape), dtype=torch.uint8)
    _send_result_kernel[(triton.cdiv(len(result_Y), LANES),)](result_Y, host_Y, len(result_Y), LANES=LANES, num_warps=4)
