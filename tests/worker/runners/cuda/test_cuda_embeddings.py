"""Embeddings of the CUDA runner, on a GPU or in Triton's interpreter, against the torch runner on the same plans."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from octavo.wire.messages import Pooling
from tests.support.model.interpreter import WARNINGS
from tests.support.worker.cuda_runners import VOCAB, runner_pair, world

pytestmark = [*WARNINGS, pytest.mark.usefixtures("few_items")]


def test_both_poolings_in_chunks_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(runner_pair(), monkeypatch, num_blocks=64, max_batch_tokens=9)
    rng = np.random.default_rng(0)
    here.add(0, rng.integers(0, VOCAB, 5).tolist(), max_tokens=6, ignore_eos=True)
    for handle, pooling in enumerate((Pooling.MEAN, Pooling.LAST_TOKEN, Pooling.MEAN), start=1):
        here.add(handle, rng.integers(0, VOCAB, 9 + handle).tolist(), pooling=pooling)
    here.run()
    here.check_quiet()
    assert here.reasons() == dict.fromkeys(range(4), "LENGTH")
    assert [stream.embedding is None for stream in here.streams.values()] == [True, False, False, False]
