"""`octavo chat`: a conversation in the terminal."""

import contextlib
import sys
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from octavo import Client, TextStream
from octavo.cli.client.connect import connect
from octavo.cli.client.generate_options import request_fields
from octavo.cli.client.receipt import receipt_line
from octavo.cli.errors import usage
from octavo.cli.explain import explain, show_error
from octavo.cli.settings.groups import ClientSettings
from octavo.client.errors import OctavoError
from octavo.v1 import model_pb2

PROMPT = "› "
COLOURED = f"\001\033[1;36m\002{PROMPT}\001\033[0m\002"  # 001 and 002 tell readline what takes no room
HELP = "/reset forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops an answer"


@dataclass(slots=True)
class Conversation:
    """The turns so far. A failed turn is not kept."""

    system: str
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[tuple[str, str]]:
        """The messages to send for the next question."""
        return [*([("system", self.system)] if self.system else []), *self.turns, ("user", question)]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.turns += [("user", question), ("assistant", answer)]

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()


def chat(settings: ClientSettings, *, system: str, shows_receipts: bool) -> int:
    """Talk until /exit or the end of input. Returns 1 if questions came from a file or pipe and one of them failed;
    a person has seen it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and the arrow keys' history)
    console = Console(highlight=False)
    conversation, num_failed = Conversation(system), 0
    with connect(settings) as client:
        models = client.models()
        console.print(f"[bold]{escape(_model_line(models, settings))}[/]\n[dim]{HELP}[/]")
        while (question := _ask(console)) is not None:
            if question in ("/exit", "/quit"):
                break
            if question.startswith("/"):
                _command(question, conversation, console)
            elif question and not _answer(
                client, settings, conversation, question, console, shows_receipts=shows_receipts
            ):
                num_failed += 1
    return 1 if num_failed and not sys.stdin.isatty() else 0


def _ask(console: Console) -> str | None:
    """The next line; None at the end of input. Ctrl-C gives an empty one."""
    try:
        prompt = COLOURED if console.color_system and not console.no_color else PROMPT
        return input(prompt if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        console.print()
        return ""
    except EOFError:
        return None


def _command(text: str, conversation: Conversation, console: Console) -> None:
    if text == "/reset":
        conversation.reset()
        console.print("[dim]the conversation starts anew[/]")
    else:
        console.print(f"[dim]{HELP}[/]")


def _answer(
    client: Client,
    settings: ClientSettings,
    conversation: Conversation,
    question: str,
    console: Console,
    *,
    shows_receipts: bool,
) -> bool:
    """Print the answer, or the error on stderr. Returns whether there is an answer."""
    fields = request_fields(settings)
    fields["messages"] = conversation.messages(question)
    try:
        stream = client.stream(timeout_s=settings.timeout_s, **fields)
    except ValueError as error:  # half a character, as a terminal may leave
        show_error(usage("this cannot be asked", str(error), "ask it in other words"))
        return False
    is_answered = True
    try:
        conversation.add(question, _print_answer(stream))
    except OctavoError as error:
        is_answered = False
        console.print()
        show_error(explain(error))
    if shows_receipts and stream.finished is not None:
        console.print(f"[dim]{escape(receipt_line(stream.finished))}[/]")
    return is_answered


def _print_answer(stream: TextStream) -> str:
    """Print the answer as it comes. Ctrl-C ends the request and keeps what came so far."""
    pieces: list[str] = []
    try:
        for text in stream:
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
        sys.stdout.write(" …")
    sys.stdout.write("\n")
    return "".join(pieces)


def _model_line(models: list[model_pb2.ModelInfo], settings: ClientSettings) -> str:
    from octavo.model.checkpoint.source import embedded_names

    for model in models:
        if not settings.model_name or model.name == settings.model_name:
            kind = ", a small demo model" if model.name in embedded_names() else ""
            return f"{model.name}{kind} ({model.dtype}, {model.max_model_len:,} tokens)"
    return settings.model_name
