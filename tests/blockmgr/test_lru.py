"""The queue of cached free blocks against an ordered dictionary."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.blockmgr.pool import LruQueue

NUM_BLOCKS = 7
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.permutations(range(NUM_BLOCKS)), st.integers(0, NUM_BLOCKS)),
        st.tuples(st.just("discard"), st.permutations(range(NUM_BLOCKS)), st.integers(0, NUM_BLOCKS)),
        st.tuples(st.just("pop"), st.just(()), st.integers(0, NUM_BLOCKS)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_any_operations_give_what_an_ordered_dictionary_gives(
    operations: list[tuple[str, tuple[int, ...], int]],
) -> None:
    queue, reference = LruQueue(NUM_BLOCKS), OrderedDict[int, None]()
    for verb, order, num in operations:
        if verb == "push":
            blocks = [block for block in order[:num] if block not in reference]
            queue.push(np.array(blocks, np.int32))
            reference.update(dict.fromkeys(blocks))
        elif verb == "discard":
            blocks = [block for block in order[:num] if block in reference]
            queue.discard(np.array(blocks, np.int32))
            for block in blocks:
                del reference[block]
        else:
            num = min(num, len(reference))
            assert queue.pop(num).tolist() == [reference.popitem(last=False)[0] for _ in range(num)]
        assert (queue.to_array().tolist(), len(queue)) == (list(reference), len(reference))
        assert queue.contains(np.arange(NUM_BLOCKS)).tolist() == [block in reference for block in range(NUM_BLOCKS)]


def test_many_dead_entries_are_skipped() -> None:
    queue = LruQueue(1000)
    queue.push(np.arange(1000, dtype=np.int32))
    queue.discard(np.arange(999, dtype=np.int32))
    assert queue.pop(1).tolist() == [999]
    with pytest.raises(LookupError, match="1 wanted, 0 in the queue"):
        queue.pop(1)
