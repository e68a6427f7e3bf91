"""How GPTQ and AWQ checkpoints pack integers into int32 words, unpacked to one code an element.

GPTQ (AutoGPTQ, QuantLinear.pack): `qweight` [I * bits / 32, O], a word holds neighbouring *inputs*, lowest bits first;
`qzeros` [G, O * bits / 32], a word holds neighbouring *outputs*; `g_idx` [I] is the group of each input. The first
format stores zero points less one (a zero point of 0 wraps around); "gptq_v2" stores them as they are.

AWQ (AutoAWQ, WQLinear_GEMM): `qweight` [I, O / 8] and `qzeros` [G, O / 8], a word holds 8 neighbouring outputs in the
order 0 2 4 6 1 3 5 7, lowest bits first.

Legend: O outputs · I inputs · G groups · C columns of words.
Must not know: files, kernels.
"""

import torch

from model.quantization.grouped import GroupedWeight
from model.quantization.settings import GroupSettings, Packing

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbouring outputs lies in the lowest four bits, in the next, and so on."""


class PackingError(ValueError):
    """The tensors of a quantised matrix contradict each other; names the tensor."""


def packed_shapes(settings: GroupSettings, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a quantised matrix and their shapes. `scales` are floats, the others int32.

    Raises ValueError where the matrix cannot be quantised this way.
    """
    groups, per_word = settings.groups_of(num_inputs), 32 // settings.bits
    if num_outputs % per_word or num_inputs % per_word:
        raise ValueError(f"{num_outputs} outputs and {num_inputs} inputs are no multiples of {per_word}")
    zeros, scales = (groups, num_outputs // per_word), (groups, num_outputs)
    if settings.packing is Packing.AWQ:
        return {"qweight": (num_inputs, num_outputs // per_word), "qzeros": zeros, "scales": scales}
    words = (num_inputs // per_word, num_outputs)
    return {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": (num_inputs,)}


def unpack(settings: GroupSettings, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> GroupedWeight:
    """The matrix that tensors of `packed_shapes` hold. Raises PackingError for a g_idx that is none."""
    per_word, scale_GO, order_I = 32 // settings.bits, tensors["scales"], None
    if settings.packing is Packing.AWQ:
        # Place p of a word is output AWQ_ORDER[p]; so output o is in the place where AWQ_ORDER has o.
        place = torch.tensor([AWQ_ORDER.index(o) for o in range(per_word)], device=scale_GO.device)
        code_OI = split_words(tensors["qweight"], settings.bits)[:, :, place].flatten(1).T
        zero_GO = split_words(tensors["qzeros"], settings.bits)[:, :, place].flatten(1)
    else:
        code_OI = split_words(tensors["qweight"].T, settings.bits).flatten(1)
        zero_GO = split_words(tensors["qzeros"], settings.bits).flatten(1)
        order_I = input_order(tensors["g_idx"], num_groups=len(scale_GO))
    if order_I is not None:
        code_OI = code_OI[:, order_I.long()]
    zero_GO = ((zero_GO.int() + settings.zero_offset) & (2**settings.bits - 1)).to(torch.uint8)
    return GroupedWeight.pack(code_OI, scale_GO, zero_GO, bits=settings.bits, dtype=dtype, order_I=order_I)


def split_words(words_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, C, 32 / bits]: the integers of each int32 word, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words_RC.device)
    return ((words_RC[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8)


def input_order(group_I: torch.Tensor, *, num_groups: int) -> torch.Tensor | None:
    """int32: inputs sorted by their group, None where they are already. Raises PackingError where groups are not all of
    one size."""
    I = len(group_I)
    if int(group_I.min()) < 0 or int(group_I.max()) >= num_groups:
        raise PackingError(f"g_idx: names groups {int(group_I.min())} to {int(group_I.max())}, of {num_groups}")
    counts = torch.bincount(group_I.long(), minlength=num_groups)
    if bool((counts != I // num_groups).any()):
        raise PackingError(
            f"g_idx: groups have {int(counts.min())} to {int(counts.max())} inputs, not {I // num_groups}"
        )
    order_I = torch.argsort(group_I.long(), stable=True).to(torch.int32)
    return None if torch.equal(order_I, torch.arange(I, dtype=torch.int32, device=order_I.device)) else order_I
