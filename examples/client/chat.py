"""A conversation of several turns with asyncio: each answer becomes part of the next prompt, whose beginning is cached.

python examples/client/chat.py --target 127.0.0.1:50051 "What is your name?" "And what do you like?"
"""

import argparse
import asyncio

from octavo import AsyncClient


async def talk(target: str, questions: list[str], max_tokens: int) -> None:
    """Ask the questions one after another."""
    messages: list[tuple[str, str]] = [("system", "You are a friendly assistant. Be brief.")]
    async with AsyncClient(target) as client:
        for question in questions:
            messages.append(("user", question))
            print(f"> {question}")
            stream = client.stream(messages=messages, max_tokens=max_tokens, timeout_s=60)
            answer = ""
            async for text in stream:
                answer += text
                print(text, end="", flush=True)
            messages.append(("assistant", answer))
            usage = stream.finished.usage
            print(f"\n  [{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached]")


def main(arguments: list[str] | None = None) -> int:
    """Ask the questions of the command line. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=["What is your name?", "Tell me a story about a fox."])
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=60)
    given = parser.parse_args(arguments)
    asyncio.run(talk(given.target, given.questions, given.max_tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
