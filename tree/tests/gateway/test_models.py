"""Which model a request means, and when its text side is there."""

import pytest

from gateway.errors import InvalidRequest, ModelNotFound
from gateway.models import ServedModels
from gateway.text.errors import TextQueueFull, UnsupportedTokenizer
from gateway.text.service import TextService
from gateway.workers.errors import NoWorker
from tests.support.fake_pool import model_card
from tests.support.tokenizers_tiny import tiny_files


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


async def test_text_work_is_bounded_and_its_place_is_given_back() -> None:
    import asyncio
    import threading

    service, gate = TextService(num_threads=1, max_waiting=2), threading.Event()
    first, second = (asyncio.create_task(service.run(lambda: gate.wait(5))) for _ in range(2))
    await asyncio.sleep(0.01)
    with pytest.raises(TextQueueFull):
        await service.run(lambda: None)
    first.cancel()  # its work has begun: the place is taken until the thread is done
    await asyncio.gather(first, return_exceptions=True)
    assert service.num_waiting == 2
    gate.set()
    assert await second
    await asyncio.sleep(0.05)
    assert service.num_waiting == 0
    assert await service.run(lambda: 41 + 1) == 42
    service.close()
    service.close()
