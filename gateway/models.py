"""The models that workers serve, and the text side of each.

Loads tokenizers off the event loop, once per bundle. Knows no RPC.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from gateway.errors import InvalidRequest, ModelNotFound, Violation
from gateway.text.errors import UnsupportedTokenizer
from gateway.text.model_text import ModelText
from gateway.workers.errors import NoWorker
from wire.messages import ModelCard

log = structlog.get_logger(__name__)
_TextKey = tuple[str, int]  # digest of the bundle, number of ids


class ServedModels:
    """Owns the loading tasks. Every method on the event loop."""

    def __init__(self) -> None:
        self._texts: dict[_TextKey, ModelText | UnsupportedTokenizer] = {}
        self._files: dict[str, Mapping[str, bytes]] = {}  # by digest
        self._loading: dict[_TextKey, asyncio.Task[None]] = {}
        self._seen: set[str] = set()
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back whenever a tokenizer has been loaded."""
        self._callbacks.append(callback)

    def on_model(self, card: ModelCard, files: Mapping[str, bytes]) -> None:
        """A model became ready at a worker (again)."""
        self._seen.add(card.name)
        self._files[card.tokenizer_digest] = files
        key = (card.tokenizer_digest, card.vocab_size)
        if key not in self._texts and key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load(key, card.name, dict(files)), name=f"load {card.name}")

    async def _load(self, key: _TextKey, model: str, files: dict[str, bytes]) -> None:
        try:
            self._texts[key] = await asyncio.to_thread(ModelText, files, num_ids=key[1])
            log.info("tokenizer_ready", model=model, digest=key[0][:12])
        except UnsupportedTokenizer as error:
            self._texts[key] = error
            log.error("tokenizer_refused", model=model, reason=str(error), served="token ids only")
        except Exception as error:  # a defect of ours must not leave the model "loading" for ever
            self._texts[key] = UnsupportedTokenizer("the tokenizer could not be loaded")
            log.error("tokenizer_failed", model=model, exc_info=error)
        finally:
            self._loading.pop(key, None)
        for callback in self._callbacks:
            callback()

    def is_loaded(self, card: ModelCard) -> bool:
        """Whether requests for the model can be answered (with text, or at least with ids)."""
        return (card.tokenizer_digest, card.vocab_size) in self._texts

    def text_of(self, card: ModelCard) -> ModelText:
        """Raises UnsupportedTokenizer; NoWorker while it is being loaded."""
        text = self._texts.get((card.tokenizer_digest, card.vocab_size))
        if text is None:
            raise NoWorker(card.name)
        if isinstance(text, UnsupportedTokenizer):
            raise UnsupportedTokenizer(str(text))
        return text

    def files_of(self, card: ModelCard) -> Mapping[str, bytes]:
        """The tokenizer bundle by file name. Raises NoWorker where it has not come."""
        files = self._files.get(card.tokenizer_digest)
        if files is None:
            raise NoWorker(card.name)
        return files

    def resolve(self, name: str, cards: Mapping[str, ModelCard], *, path: str = "model") -> ModelCard:
        """The card that a request means. path: of the field that names it. Raises NoWorker, ModelNotFound,
        InvalidRequest."""
        if name:
            if name in cards:
                return cards[name]
            if not cards or name in self._seen:
                raise NoWorker(name)
            raise ModelNotFound("no such model is served here")
        if not cards:
            raise NoWorker("")
        if len(cards) > 1:
            names = ", ".join(sorted(cards)[:8])
            raise InvalidRequest((Violation(field=path, description=f"must be set, several are served: {names}"),))
        return next(iter(cards.values()))

    async def close(self) -> None:
        """Wait for what is loading. Idempotent."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
