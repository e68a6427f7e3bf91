"""What Dynamo's router is told of a prefix cache: each block once, after the one that it follows."""

import random

from octavo.openengine import openengine_pb2 as oe
from octavo_dynamo.cache import CacheMirror, Removed, Stored

SIZE = 4
GPU, HOST = oe.STORAGE_MEDIUM_GPU, oe.STORAGE_MEDIUM_CPU_PINNED


def name(number: int) -> oe.KvBlockHash:
    return oe.KvBlockHash(value=number.to_bytes(8, "big", signed=True), encoding="int64")


def tokens(number: int) -> list[int]:
    return [number % 1000] * SIZE


def stored(*numbers: int, parent: int | None = None, medium: int = GPU, size: int = SIZE) -> oe.KvEvent:
    ids = [token for number in numbers for token in tokens(number)]
    event = oe.BlockStored(block_hashes=map(name, numbers), token_ids=ids, block_size=size, medium=medium)  # type: ignore[arg-type]
    if parent is not None:
        event.parent_block_hash.CopyFrom(name(parent))
    return oe.KvEvent(block_stored=event)


def removed(*numbers: int, medium: int = GPU) -> oe.KvEvent:
    return oe.KvEvent(block_removed=oe.BlockRemoved(block_hashes=map(name, numbers), medium=medium))  # type: ignore[arg-type]


def cleared() -> oe.KvEvent:
    return oe.KvEvent(all_blocks_cleared=oe.AllBlocksCleared())


def batch(*events: oe.KvEvent) -> oe.KvEventBatch:
    return oe.KvEventBatch(events=events)


class Router:
    """Keeps what it is told, and that it is told each block once and after the one that it follows."""

    def __init__(self) -> None:
        self.prompts: dict[int, tuple[int, ...]] = {}

    def take(self, news: list[Stored | Removed]) -> list[tuple[int, ...]]:
        """The prompts that are new here, by their tokens."""
        new = []
        for each in news:
            if isinstance(each, Removed):
                for number in each.hashes:
                    ids = self.prompts.pop(number)
                    assert not any(other[: len(ids)] == ids for other in self.prompts.values()), "something follows it"
                continue
            before = () if each.parent is None else self.prompts[each.parent]
            for index, number in enumerate(each.hashes):
                before += tuple(each.token_ids[index * SIZE : (index + 1) * SIZE])
                assert number not in self.prompts, "told twice"
                self.prompts[number] = before
                new.append(before)
        return new


def prompt(*numbers: int) -> tuple[int, ...]:
    return tuple(token for number in numbers for token in tokens(number))


def test_blocks_are_told_with_their_tokens_and_what_they_follow() -> None:
    news = CacheMirror(SIZE).take(batch(stored(1, -2), stored(3, parent=-2), stored(4, parent=1)))
    assert [type(each) for each in news] == [Stored, Stored]
    assert Router().take(news) == [prompt(1), prompt(1, -2), prompt(1, -2, 3), prompt(1, 4)]


def test_a_prompt_has_the_same_names_at_every_service() -> None:
    """Whatever numbers the service has for its blocks."""
    one, other = CacheMirror(SIZE), CacheMirror(SIZE)
    (first,) = one.take(batch(stored(1001, 2001)))
    other.take(batch(stored(5)))
    (second,) = other.take(batch(stored(3001, 4001)))
    assert first == Stored(hashes=first.hashes, token_ids=[1] * 8)
    assert second == first
    assert len(set(first.hashes)) == 2  # though both blocks have the same tokens


def test_what_was_told_is_not_told_again() -> None:
    mirror, router = CacheMirror(SIZE), Router()
    router.take(mirror.take(batch(stored(1, 2))))
    assert router.take(mirror.take(batch(stored(1, 2, 3)))) == [prompt(1, 2, 3)]
    assert mirror.take(batch(stored(2, parent=1))) == []


def test_what_follows_an_unknown_block_waits_for_it() -> None:
    mirror, router = CacheMirror(SIZE), Router()
    assert mirror.take(batch(stored(3, 4, parent=2), stored(5, parent=4))) == []
    assert router.take(mirror.take(batch(stored(1, 2)))) == [
        prompt(1),
        prompt(1, 2),
        prompt(1, 2, 3),
        prompt(1, 2, 3, 4),
        prompt(1, 2, 3, 4, 5),
    ]


def test_what_follows_a_block_goes_with_it_and_comes_back_with_it() -> None:
    mirror, router = CacheMirror(SIZE), Router()
    router.take(mirror.take(batch(stored(1, 2, 3))))
    router.take(mirror.take(batch(removed(2))))
    assert [*router.prompts.values()] == [prompt(1)]
    assert router.take(mirror.take(batch(stored(2, parent=1)))) == [prompt(1, 2), prompt(1, 2, 3)]
    router.take(mirror.take(batch(removed(2, 3), removed(9))))
    assert mirror.take(batch(stored(2, parent=1))) != []
    assert mirror.take(batch(removed(3))) == []


def test_a_block_that_moves_to_the_hosts_memory_stays() -> None:
    mirror, router = CacheMirror(SIZE), Router()
    router.take(mirror.take(batch(stored(1, 2))))
    assert mirror.take(batch(removed(2), stored(2, parent=1, medium=HOST))) == []
    assert mirror.take(batch(stored(2, parent=1), removed(2, medium=HOST))) == []
    router.take(mirror.take(batch(removed(2))))
    assert [*router.prompts.values()] == [prompt(1)]


def test_a_new_beginning_tells_the_difference() -> None:
    mirror, router = CacheMirror(SIZE), Router()
    router.take(mirror.take(batch(cleared(), stored(1, 2, 3))))
    # After a restart the numbers are others.
    again = batch(cleared(), stored(1001, 1002), stored(1004, parent=1001))
    assert router.take(mirror.take(again)) == [prompt(1, 4)]
    assert set(router.prompts.values()) == {prompt(1), prompt(1, 2), prompt(1, 4)}
    router.take(mirror.forget())
    assert router.prompts == {}
    assert mirror.forget() == []


def test_blocks_of_another_size_are_counted_and_not_told() -> None:
    mirror = CacheMirror(SIZE)
    assert mirror.take(batch(stored(1, 2, size=2 * SIZE))) == []
    assert mirror.num_alien == 2


def test_a_router_that_follows_has_what_can_be_used_of_a_service() -> None:
    """Random changes of a tree of prompts in random batches, with repetitions and new beginnings."""
    parents: dict[int, int | None] = {number: None if number < 4 else number // 2 for number in range(1, 24)}

    def path(number: int) -> list[int]:
        parent = parents[number]
        return [*path(parent), number] if parent is not None else [number]

    for seed in range(150):
        draw = random.Random(seed)
        mirror, router = CacheMirror(SIZE), Router()
        service: dict[int, set[int]] = {}
        for _ in range(20):
            events = []
            if draw.random() < 0.15:
                told = [(number, medium) for number, held in service.items() for medium in held]
                draw.shuffle(told)
                events = [cleared(), *(stored(each, parent=parents[each], medium=medium) for each, medium in told)]
            for _ in range(draw.randrange(8)):
                number, medium = draw.choice([*parents]), draw.choice([GPU, HOST])
                if draw.random() < 0.6:
                    service.setdefault(number, set()).add(medium)
                    events.append(stored(number, parent=parents[number], medium=medium))
                else:
                    service.get(number, set()).discard(medium)
                    events.append(removed(number, medium=medium))
                service = {each: held for each, held in service.items() if held}
            router.take(mirror.take(batch(*events)))
            usable = {prompt(*path(number)) for number in service if service.keys() >= {*path(number)}}
            assert set(router.prompts.values()) == usable
