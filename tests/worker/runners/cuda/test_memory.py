"""What a runner is said to take besides weights and pool, by how much free memory each part of its rehearsal leaves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from octavo.worker.runners.cuda import memory
from octavo.worker.runners.cuda.graph_runner import Launching

MIB = 1 << 20
NUM_SHAPES = 20


class Device:
    """Memory that is free before and after the largest steps, the first two graphs and two more. elsewhere: bytes that
    another process takes or, below 0, gives back while two more are recorded."""

    def __init__(self, *, steps: int, first: int, more: int, elsewhere: int) -> None:
        left = [100_000 * MIB]
        for taken in (steps, first, more + elsewhere):
            left.append(left[-1] - taken)
        self._left = iter(left)

    def free_bytes(self, _: object) -> int:
        return next(self._left)


@pytest.mark.parametrize(
    ("elsewhere", "told"),
    [
        pytest.param(0, 500 * MIB + 80 * MIB + 20 * 3 * MIB, id="alone"),
        pytest.param(6_000 * MIB, 500 * MIB + 80 * MIB + 20 * 80 * MIB, id="another process takes memory"),
        pytest.param(-6_000 * MIB, 500 * MIB + 80 * MIB, id="another process gives memory back"),
    ],
)
def test_what_another_process_takes_is_not_multiplied_by_the_number_of_graphs(
    monkeypatch: pytest.MonkeyPatch, elsewhere: int, told: int
) -> None:
    graphs = SimpleNamespace(num_shapes=NUM_SHAPES * 2, record_largest=lambda _: (None, None))
    device = Device(steps=500 * MIB, first=80 * MIB, more=3 * MIB, elsewhere=elsewhere)
    monkeypatch.setattr(memory, "CudaRunner", lambda *_: SimpleNamespace(graphs=graphs))
    monkeypatch.setattr(memory, "GraphRecorder", lambda: None)
    monkeypatch.setattr(memory, "run_largest_steps", lambda _: None)
    monkeypatch.setattr(memory, "_free_bytes", device.free_bytes)
    monkeypatch.setattr(memory.torch.cuda, "synchronize", lambda _: None)
    weights = SimpleNamespace(embed_VD=SimpleNamespace(device="cuda"))
    assert memory._rehearse(weights, SimpleNamespace(launching=Launching.GRAPHS)) == told  # type: ignore[arg-type]
