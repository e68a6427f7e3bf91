"""The models that workers serve, and the tokenizer and template of each.

Tokenizers are loaded off the event loop, once per bundle, and dropped when they were not used for a while. Knows no RPC
and no clock.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog

from octavo.gateway.errors import InvalidRequest, ModelNotFound
from octavo.gateway.text.errors import UnsupportedTokenizer
from octavo.gateway.text.model_text import ModelText
from octavo.gateway.workers.errors import NoWorker
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerView
from octavo.wire.messages import ModelCard

log = structlog.get_logger(__name__)
KEPT_S = 600.0
"""A tokenizer stays so long after its last use: a worker that starts again finds it loaded."""
FIRST_RETRY_S, MAX_DOUBLINGS = 1.0, 6

_TextKey = tuple[str, int]  # digest of the bundle, number of ids


def _key_of(card: ModelCard) -> _TextKey:
    return card.tokenizer_digest, card.vocab_size


def check_same(card: ModelCard, worker: WorkerView) -> None:
    """Raises NoWorker if the chosen worker no longer has the model that the request was prepared for."""
    if worker.card != card:
        raise NoWorker(card.name, f"model {card.name!r} was replaced by another of its name: send the request again")


class ServedModels:
    """Owns the tasks that load tokenizers. Every method on the event loop."""

    def __init__(self, expected: Iterable[str] = ()) -> None:
        """expected: names of the models that the service should have; empty: whatever workers bring."""
        self.expected = tuple(dict.fromkeys(expected))
        self._texts: dict[_TextKey, ModelText | UnsupportedTokenizer] = {}
        self._files: dict[str, Mapping[str, bytes]] = {}  # by digest
        self._loading: dict[_TextKey, asyncio.Task[None]] = {}
        self._last_used_s: dict[_TextKey, float] = {}  # of those that are loaded
        self._failures: dict[_TextKey, int] = {}  # how often loading has failed, though the bundle may be good
        self._retry_s: dict[_TextKey, float] = {}  # when those are tried again
        self._seen: set[str] = set()
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back whenever a tokenizer has been loaded."""
        self._callbacks.append(callback)

    def on_model(self, card: ModelCard, files: Mapping[str, bytes]) -> None:
        """A model became ready at a worker, perhaps not for the first time."""
        self._seen.add(card.name)
        self._files[card.tokenizer_digest] = files
        key = _key_of(card)
        if key not in self._texts:
            self._begin(key, card.name)

    def _begin(self, key: _TextKey, model: str) -> None:
        if key not in self._loading:
            files = dict(self._files[key[0]])
            self._loading[key] = asyncio.create_task(self._load(key, model, files), name=f"load {model}")

    async def _load(self, key: _TextKey, model: str, files: dict[str, bytes]) -> None:
        try:
            self._texts[key] = await asyncio.to_thread(ModelText, files, num_ids=key[1])
            self._failures.pop(key, None)
            log.info("tokenizer_ready", model=model, digest=key[0][:12])
        except UnsupportedTokenizer as error:
            self._texts[key] = error
            log.error("tokenizer_refused", model=model, reason=str(error), served="token ids only")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # after a defect of ours, or a panic, the model must not stay "loading"
            self._texts[key] = UnsupportedTokenizer("the tokenizer could not be loaded; it is tried again")
            self._failures[key] = self._failures.get(key, 0) + 1
            log.error("tokenizer_failed", model=model, exc_info=error, num_failures=self._failures[key])
        finally:
            self._loading.pop(key, None)
        for callback in self._callbacks:
            callback()

    def retry_failed(self, used: Iterable[ModelCard], now_s: float) -> None:
        """Retry loads that failed, for instance for want of a thread or memory: after one second, then with delays that
        double up to a minute. used: the models of all workers. now_s: monotonic."""
        for card in used:
            key = _key_of(card)
            if key not in self._failures or key in self._loading:
                continue
            wait_s = FIRST_RETRY_S * 2 ** min(MAX_DOUBLINGS, self._failures[key] - 1)
            if now_s >= self._retry_s.setdefault(key, now_s + wait_s):
                del self._retry_s[key]
                self._begin(key, card.name)

    def drop_unused(self, used: Iterable[ModelCard], now_s: float) -> None:
        """Forget tokenizers and files unused for `KEPT_S`. used: the models of all workers and live requests. now_s:
        monotonic."""
        used_keys = {_key_of(card) for card in used}
        for key in tuple(self._texts):
            if key in used_keys:
                self._last_used_s[key] = now_s
            elif now_s - self._last_used_s.setdefault(key, now_s) > KEPT_S:
                del self._texts[key], self._last_used_s[key]
                self._failures.pop(key, None)
                self._retry_s.pop(key, None)
                log.info("tokenizer_dropped", digest=key[0][:12])
        digests = {digest for digest, _ in (*self._texts, *self._loading)}
        self._files = {digest: files for digest, files in self._files.items() if digest in digests}

    def is_loaded(self, card: ModelCard) -> bool:
        """Whether requests for the model can be answered, with text or at least with ids."""
        return _key_of(card) in self._texts

    def text_of(self, card: ModelCard) -> ModelText:
        """The model's tokenizer and templates. Raises UnsupportedTokenizer, and NoWorker while it is being loaded."""
        text = self._texts.get(_key_of(card))
        if text is None:
            raise NoWorker(card.name)
        if isinstance(text, UnsupportedTokenizer):
            raise UnsupportedTokenizer(str(text))
        return text

    def token_texts(self, card: ModelCard) -> tuple[bytes, ...]:
        """The bytes of each token; empty for a model that takes and gives ids only. Raises NoWorker."""
        try:
            return self.text_of(card).table.all_bytes
        except UnsupportedTokenizer:
            return ()

    def files_of(self, card: ModelCard) -> Mapping[str, bytes]:
        """The tokenizer bundle by file name. Raises NoWorker before it has arrived."""
        files = self._files.get(card.tokenizer_digest)
        if files is None:
            raise NoWorker(card.name)
        return files

    def names(self, cards: Mapping[str, ModelCard]) -> list[str]:
        """Names of all models that are, were or should be served. cards: of those that workers are ready for."""
        return sorted({*self.expected, *self._seen, *cards})

    def are_ready(self, cards: Mapping[str, ModelCard]) -> bool:
        """Whether all expected models are ready; if none is expected, whether any is."""
        if self.expected:
            return all(self.is_ready(name, cards) for name in self.expected)
        return any(map(self.is_loaded, cards.values()))

    def is_ready(self, name: str, cards: Mapping[str, ModelCard]) -> bool:
        """Whether requests for this model can be answered now."""
        return name in cards and self.is_loaded(cards[name])

    def resolve(
        self, name: str, cards: Mapping[str, ModelCard], registered: Collection[str] = (), *, path: str = "model"
    ) -> ModelCard:
        """The card of the model that a request names. registered: names of models whose workers are not ready yet.
        path: of the field that names the model. Raises NoWorker, ModelNotFound, InvalidRequest."""
        if name in cards:
            return cards[name]
        if name:
            if name in self.expected or name in self._seen or name in registered:
                raise NoWorker(name, f"model {name!r} is not ready: no worker has it loaded now")
            if not cards and not self.expected:
                raise NoWorker(name)
            raise ModelNotFound("no such model is served here")
        names = sorted({*self.expected, *cards})
        if len(names) > 1:
            shown = ", ".join(names[:8])
            raise InvalidRequest.of(path, f"must be set, several are served: {shown}")
        if not cards:
            raise NoWorker(names[0] if names else "")
        return next(iter(cards.values()))

    def card_of(self, name: str, pool: WorkerPool, *, path: str = "model") -> ModelCard:
        """`resolve` against the workers that the pool has now."""
        cards = pool.cards()
        registered = {worker.card.name for worker in pool.workers()} if name and name not in cards else ()
        return self.resolve(name, cards, registered, path=path)

    async def close(self) -> None:
        """Wait for loads in progress. Idempotent."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
