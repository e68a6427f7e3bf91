"""The process in which chat templates of checkpoints run: foreign code. Asked by `gateway.text.process_pool`:

JSON {"template", "chat", "max_bytes", ...}
"""

import json
from collections import OrderedDict

from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError
from octavo.gateway.text.process_child import DONE, REFUSED, answer_frames

TOO_LONG = b"L"
KNOWN_TEMPLATES = 16
_MAX_REASON = 2000


def main() -> None:
    """Until the parent has no more chats."""
    templates = OrderedDict[str, ChatTemplate]()
    answer_frames(lambda frame: _answer(frame, templates))


def _answer(frame: bytes, templates: "OrderedDict[str, ChatTemplate]") -> tuple[bytes, bytes]:
    try:
        asked = json.loads(frame)
        if "source" in asked:
            templates[asked["template"]] = ChatTemplate(asked["source"], asked["special_tokens"])
            if len(templates) > KNOWN_TEMPLATES:
                templates.popitem(last=False)
        text = templates[asked["template"]].render(ChatInput(**asked["chat"]), max_bytes=asked["max_bytes"])
        return DONE, text.encode("utf-8", "surrogatepass")
    except PromptTooLong as error:
        return TOO_LONG, str(error.num_bytes).encode()
    except TemplateError as error:
        return REFUSED, str(error)[:_MAX_REASON].encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
