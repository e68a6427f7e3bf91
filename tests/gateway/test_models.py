"""Which model a request means, and when its text side is there."""

import itertools
import time
from typing import Any

import pytest

from octavo.gateway import models as models_module
from octavo.gateway.errors import InvalidRequest, ModelNotFound
from octavo.gateway.models import FIRST_RETRY_S, KEPT_S, ServedModels
from octavo.gateway.text.errors import TextQueueFull, UnsupportedTokenizer
from octavo.gateway.text.service import TextService
from octavo.gateway.workers.errors import NoWorker
from octavo.gateway.workers.views import WorkerState
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.tokenizers_tiny import tiny_files


async def test_a_bundle_is_loaded_once_for_all_models_that_share_it() -> None:
    models, changes = ServedModels(), list[int]()
    models.on_change(lambda: changes.append(1))
    one, two, other = model_card("one"), model_card("two"), model_card("other", tokenizer_digest="e" * 64)
    with pytest.raises(NoWorker):
        models.text_of(one)
    for card in (one, two, one, other):
        models.on_model(card, tiny_files())
    assert not models.is_loaded(one)
    await models.close()
    assert models.text_of(one) is models.text_of(two)
    assert models.text_of(other) is not models.text_of(one)
    assert len(changes) == 2


async def test_a_tokenizer_that_cannot_be_used_is_said_so_every_time_and_the_model_is_there() -> None:
    models = ServedModels()
    models.on_model(model_card(), {"tokenizer.json": b'{"model": {"type": "WordPiece"}, "decoder": {}}'})
    await models.close()
    assert models.is_loaded(model_card())
    for _ in range(2):
        with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
            models.text_of(model_card())


async def test_a_panic_while_a_tokenizer_is_loaded_leaves_no_model_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise BaseException("no thread")  # as libraries in Rust raise it, of a class of their own

    monkeypatch.setattr(models_module, "ModelText", panic)
    models = ServedModels()
    models.on_model(model_card(), tiny_files())
    await models.close()
    with pytest.raises(UnsupportedTokenizer, match="could not be loaded"):
        models.text_of(model_card())


@pytest.mark.parametrize("want", [MemoryError(), RuntimeError("can't start new thread"), BaseException("a panic")])
async def test_what_could_not_be_loaded_for_want_of_something_is_loaded_later(
    want: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(files: Any, num_ids: int) -> None:
        raise want

    models, card, changes = ServedModels(), model_card(), list[int]()
    models.on_change(lambda: changes.append(1))
    with monkeypatch.context() as patch:
        patch.setattr("octavo.gateway.models.ModelText", refuse)
        models.on_model(card, tiny_files())
        await models.close()
        assert models.is_loaded(card), "requests of ids are answered"
        with pytest.raises(UnsupportedTokenizer, match="tried again"):
            models.text_of(card)
        models.retry_failed([card], 10.0)
        models.retry_failed([card], 10.0 + FIRST_RETRY_S)
        await models.close()
    models.retry_failed([card], 20.0)
    models.retry_failed([card], 20.0 + 1.9 * FIRST_RETRY_S)
    await models.close()
    assert len(changes) == 2, "the second wait is twice as long"
    models.retry_failed([card], 20.0 + 2 * FIRST_RETRY_S)
    await models.close()
    assert models.text_of(card).table.all_bytes
    models.retry_failed([card], 30.0)
    models.retry_failed([card], 300.0)
    await models.close()
    assert len(changes) == 3


async def test_what_is_wrong_with_the_bundle_is_not_tried_again() -> None:
    models, card, changes = ServedModels(), model_card(), list[int]()
    models.on_change(lambda: changes.append(1))
    models.on_model(card, {"tokenizer.json": b"{}"})
    await models.close()
    for now_s in (0.0, 100.0):
        models.retry_failed([card], now_s)
    await models.close()
    assert len(changes) == 1


async def test_names_are_resolved() -> None:
    models, card, big = ServedModels(), model_card(), model_card("big")
    assert models.resolve("", {"tiny": card}) is card
    assert models.resolve("big", {"tiny": card, "big": big}) is big
    with pytest.raises(InvalidRequest, match="big, tiny"):
        models.resolve("", {"tiny": card, "big": big})
    with pytest.raises(ModelNotFound):
        models.resolve("big", {"tiny": card})
    for name in ("", "tiny"):
        with pytest.raises(NoWorker):
            models.resolve(name, {})
    models.on_model(big, tiny_files())
    with pytest.raises(NoWorker):  # it was served a moment ago: worth coming back
        models.resolve("big", {"tiny": card})
    await models.close()


async def test_a_tokenizer_that_nobody_needs_is_dropped_after_a_while_and_loaded_again_when_it_is_wanted() -> None:
    models, card, other = ServedModels(), model_card(), model_card("other", tokenizer_digest="e" * 64)
    for each in (card, other):
        models.on_model(each, tiny_files())
    await models.close()
    models.drop_unused([card, other], 100.0)
    models.drop_unused([other], 100.0 + KEPT_S)
    assert models.is_loaded(card)  # its worker may be starting again
    models.drop_unused([other], 100.1 + KEPT_S)
    assert [models.is_loaded(each) for each in (card, other)] == [False, True]
    for look in (models.text_of, models.files_of):
        with pytest.raises(NoWorker):
            look(card)
    assert models.files_of(other) == tiny_files()
    models.on_model(card, tiny_files())
    await models.close()
    models.drop_unused([], 100.2 + KEPT_S)  # its time begins anew
    assert models.text_of(card).table.all_bytes == models.text_of(other).table.all_bytes


async def test_the_files_of_a_bundle_stay_while_one_of_its_models_is_needed() -> None:
    models, small, large = ServedModels(), model_card(vocab_size=600), model_card(vocab_size=700)
    for each in (small, large):
        models.on_model(each, tiny_files())
    models.drop_unused([], 0.0)  # while both are being loaded
    await models.close()
    for now_s in (1.0, 2.0 + KEPT_S):
        models.drop_unused([large], now_s)
    assert [models.is_loaded(each) for each in (small, large)] == [False, True]
    assert models.files_of(large) == tiny_files()


async def test_workers_that_drain_and_requests_that_go_on_need_their_tokenizers(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        models, call = served.gateway.models, served.inference.Generate(pb.GenerateRequest(text="a", request_id="r1"))
        await served.until(lambda: pool.runs)
        moments = itertools.count(time.monotonic(), 2 * KEPT_S)
        pool.set_views(worker_view(state=WorkerState.DRAINING))
        for now_s in itertools.islice(moments, 2):
            served.gateway.ticker.refresh_tokenizers(now_s)
        assert models.is_loaded(model_card())
        pool.set_views()
        served.gateway.ticker.refresh_tokenizers(next(moments))
        assert models.is_loaded(model_card())
        pool.runs[0].finish()
        assert [message.WhichOneof("event") async for message in call][-1] == "finished"
        await served.until(lambda: len(served.gateway.tracker) == 0)
        served.gateway.ticker.refresh_tokenizers(next(moments))
        assert not models.is_loaded(model_card())


async def test_text_work_is_bounded_and_its_place_is_given_back() -> None:
    import asyncio
    import threading

    service, begun, gate = TextService(num_threads=1, max_waiting=2), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return gate.wait(30)

    first, second = (asyncio.create_task(service.run(work)) for _ in range(2))
    while not begun.is_set():  # noqa: ASYNC110  (a thread's state)
        await asyncio.sleep(0.002)
    with pytest.raises(TextQueueFull):
        await service.run(lambda: None)
    first.cancel()  # its work has begun: the place is taken until the thread is done
    await asyncio.gather(first, return_exceptions=True)
    assert service.num_waiting == 2
    gate.set()
    assert await second
    async with asyncio.timeout(30):
        while service.num_waiting:  # noqa: ASYNC110  (the thread is done soon after its result is here)
            await asyncio.sleep(0.002)
    assert await service.run(lambda: 41 + 1) == 42
    service.close()
    service.close()
