"""How many threads a rank computes with: the cores that a container leaves, not those that it sees."""

import pytest

from octavo.model.parallel import ALONE
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import loader
from octavo.worker.loading.loader import prepare


class Enough(Exception):
    """The start has gone far enough."""


@pytest.mark.parametrize(
    ("asked", "variable", "usable", "set_to"),
    [
        (None, None, 2, 2),
        (None, None, 64, None),
        (None, "8", 2, None),  # whoever says it means it
        (5, None, 2, 5),
        (5, "8", 2, 5),
    ],
)
def test_a_worker_computes_on_the_cores_that_its_container_leaves(
    asked: int | None, variable: str | None, usable: int, set_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Enough

    told: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(loader.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(loader.torch, "set_num_threads", told.append)
    monkeypatch.setattr(loader, "usable_cores", lambda: usable, raising=False)
    monkeypatch.setattr(loader, "_resolve", stop)
    config = WorkerConfig(model="none", gateway_endpoints=(), device="cpu", num_threads=asked)
    with pytest.raises(Enough):
        prepare(config, lambda *_: None, ranks=ALONE)
    assert told == ([] if set_to is None else [set_to])
