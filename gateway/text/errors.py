"""What can be wrong with text. Mapped to gRPC statuses in `gateway.errors`."""


class TextError(Exception):
    """Base; the message is fit for callers."""


class UnsupportedTokenizer(TextError):
    """The bundle is no byte-level BPE tokenizer, or is damaged: no text for this model."""


class TemplateError(TextError):
    """The chat template refused the messages, or there is none."""


class PromptTooLong(TextError):
    """The text, or the rendered chat, has more bytes than the limit."""

    def __init__(self, *, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"the text has {num_bytes} bytes, the limit is {max_bytes}")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class TextQueueFull(TextError):
    """Too many texts wait to be tokenized."""


class TooManyTokens(TextError):
    """The text has more tokens than were asked for; how many more was not counted."""

    def __init__(self, *, max_tokens: int) -> None:
        super().__init__(
            f"more than {max_tokens} prompt tokens and at least 1 of output do not fit into the context of "
            f"{max_tokens + 1} tokens"
        )
        self.max_tokens = max_tokens
