"""Seeded conversations over OpenAI's HTTP interface, the same for any server; each turn sends everything before it.

A caller asks, reads the streamed answer, thinks, and asks the next question; each conversation is a thread. Must not
know: what routes, what computes.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "model" / "embedded" / "folio-chat"
MODEL = "folio-chat"
QUESTION_WORDS = (60, 200)
SYSTEM_WORDS = (120, 240)
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """systems: number of system prompts, each shared by equally many conversations. answer: in tokens. think_s: mean of
    an exponential distribution. begin_s: conversations begin within this many seconds."""

    conversations: int = 64
    turns: int = 6
    systems: int = 8
    answer: int = 32
    think_s: float = 1.0
    begin_s: float = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the caller says, and when: seconds from the start, then after each answer."""

    system: str
    questions: tuple[str, ...]
    waits_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The outcome of one question. first_s: from the request to its first token. error: empty if it was answered."""

    number: int
    first_s: float
    prompt_tokens: int
    cached_tokens: int
    error: str = ""


@cache
def words() -> tuple[tuple[int, str], ...]:
    """Token ids and their texts, each with a leading space, so that their texts in any order are tokenized to the same
    ids."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.get_vocab_size()))
    found = ((token_id, text) for token_id, text in texts if text[:1] == " " and text[1:].isascii())
    kept = ((token_id, text) for token_id, text in found if text[1:].isalpha() and text.islower() and len(text) > 3)
    return tuple((token_id, text) for token_id, text in kept if tokenizer.encode(text).ids == [token_id])


def draw(seed: int, shape: Shape) -> list[Conversation]:
    """Random conversations; the same seed gives the same ones."""
    rng = random.Random(seed)
    texts = [text for _, text in words()]

    def said(bounds: tuple[int, int]) -> str:
        return "".join(rng.choices(texts, k=rng.randint(*bounds)))

    systems = [said(SYSTEM_WORDS) for _ in range(shape.systems)]
    return [
        Conversation(
            system=systems[number % shape.systems],
            questions=tuple(said(QUESTION_WORDS) for _ in range(shape.turns)),
            waits_s=(
                rng.uniform(0, shape.begin_s),
                *(rng.expovariate(1 / shape.think_s) for _ in range(shape.turns - 1)),
            ),
        )
        for number in range(shape.conversations)
    ]


def hold(port: int, conversations: Sequence[Conversation], answer: int) -> list[Turn]:
    """Hold all conversations concurrently at 127.0.0.1:port; returns once the last one has ended."""
    turns: list[Turn] = []
    threads = [
        threading.Thread(target=_converse, args=(port, each, answer, turns), daemon=True) for each in conversations
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns


def _converse(port: int, conversation: Conversation, answer: int, turns: list[Turn]) -> None:
    messages = [{"role": "system", "content": conversation.system}]
    for number, (question, wait_s) in enumerate(zip(conversation.questions, conversation.waits_s, strict=True)):
        time.sleep(wait_s)
        messages.append({"role": "user", "content": question})
        try:
            turn, text = ask(port, messages, answer, number)
        except (OSError, ValueError, http.client.HTTPException) as error:
            turns.append(Turn(number=number, first_s=0.0, prompt_tokens=0, cached_tokens=0, error=repr(error)[:200]))
            return
        messages.append({"role": "assistant", "content": text})
        turns.append(turn)


def ask(port: int, messages: Sequence[dict[str, str]], answer: int, number: int = 0) -> tuple[Turn, str]:
    """Ask one question. Raises ValueError if the answer is not a stream or ends early, OSError, HTTPException."""
    body = {
        "model": MODEL,
        "messages": list(messages),
        "max_tokens": answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    start_s, first_s, text, usage = time.monotonic(), 0.0, "", None
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"{response.status}: {response.read()[:150]!r}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                first_s = first_s or (time.monotonic() - start_s if piece else 0.0)
                text += piece
            usage = event.get("usage") or usage
    finally:
        connection.close()
    if usage is None or not first_s:
        raise ValueError("the stream ended without usage or without a token")
    details = usage.get("prompt_tokens_details") or {}
    turn = Turn(
        number=number,
        first_s=first_s,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )
    return turn, text
