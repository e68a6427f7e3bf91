"""From text or chat to prompt ids: the one way of everything that tokenizes what callers write.

    chat: mark (thread) -> render (a process that can be killed) -> tokenize (threads, step by step)

Must not know what the ids are for.
"""

from octavo.gateway.text.fair_queue import Share
from octavo.gateway.text.model_text import Bounds, Encoded, MarkedChat, ModelText
from octavo.gateway.text.render_pool import Renderer, chat_json
from octavo.gateway.text.service import TextService
from octavo.gateway.validation.generate import chat_input
from octavo.v1 import inference_pb2 as pb

_MARKED = 13
"""A text with marks has at most so many times its bytes: a mark for each control token, escaped as JSON."""


class Prompts:
    """One per gateway; every method on its event loop."""

    def __init__(self, text: TextService, renderer: Renderer) -> None:
        self._service = text
        self._renderer = renderer

    async def encode(
        self,
        asked: pb.GenerateRequest | pb.EmbedInput | pb.TokenizeRequest,
        text: ModelText,
        bounds: Bounds,
        share: Share,
    ) -> Encoded:
        """asked: validated, has `text` or `chat`. text: of its model. Raises TextError."""
        if asked.WhichOneof("input") == "text":
            words = asked.text
            return await self._service.run_steps(text.encoding(words, bounds), num_bytes=len(words), share=share)
        template, chat, num_bytes = text.template, asked.chat, asked.chat.ByteSize()

        def prepare() -> tuple[bytes, MarkedChat]:
            marked = text.marked(chat_input(chat))
            return chat_json(marked.chat), marked

        written, marked = await self._service.run_by_size(prepare, num_bytes=num_bytes, share=share)
        max_bytes = bounds.max_bytes * (_MARKED if marked.mark else 1)
        rendered = await self._renderer.render(template, written, max_bytes=max_bytes, share=share)
        steps = text.rendered_encoding(rendered, marked.mark, bounds)
        return await self._service.run_steps(steps, num_bytes=len(rendered), share=share)
