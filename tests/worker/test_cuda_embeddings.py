"""Embeddings of the CUDA runner, on a GPU or in Triton's interpreter, against the torch runner on the same plans."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from model.kernels import decode_work
from tests.support.cuda_twins import DEVICE, VOCAB, twins, world
from wire.messages import Pooling

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also those without work."""
    if DEVICE == "cpu":
        for name, value in (("TARGET_ITEMS", 8), ("TARGET_PROGRAMS", 16), ("MIN_CHUNK_TOKENS", 16)):
            monkeypatch.setattr(decode_work, name, value, raising=False)
        monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


def test_both_poolings_in_chunks_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(twins(), monkeypatch, num_blocks=64, max_batch_tokens=9)
    rng = np.random.default_rng(0)
    here.add(0, rng.integers(0, VOCAB, 5).tolist(), max_tokens=6, ignore_eos=True)
    for handle, pooling in enumerate((Pooling.MEAN, Pooling.LAST_TOKEN, Pooling.MEAN), start=1):
        here.add(handle, rng.integers(0, VOCAB, 9 + handle).tolist(), pooling=pooling)
    here.run()
    here.check_quiet()
    assert here.reasons() == dict.fromkeys(range(4), "LENGTH")
    assert [stream.embedding is None for stream in here.streams.values()] == [True, False, False, False]
