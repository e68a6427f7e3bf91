"""A model that calls a function: the call arrives in pieces, is run here, and its result goes back.

python examples/client/tools.py "How warm is it in Oslo?" --target 127.0.0.1:50051 --tool-choice auto
"""

import argparse
import json

from octavo import Client, assistant_turn, tool_result

WEATHER = {
    "name": "temperature",
    "description": "Present temperature of a city in degrees Celsius",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def temperature(city: str) -> str:
    """Stands in for a real weather service."""
    return json.dumps({"city": city, "celsius": {"Oslo": -3, "Rome": 14}.get(city)})


def main(arguments: list[str] | None = None) -> int:
    """Ask a question, run the calls that the model makes, and print its answer. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="How warm is it in Oslo?")
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--tool-choice", default="auto", help="auto, none, required, or the name of a tool")
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args(arguments)
    messages: list = [("user", given.question)]
    with Client(given.target) as client:
        stream = client.stream(
            messages=messages, tools=[WEATHER], tool_choice=given.tool_choice, max_tokens=given.max_tokens
        )
        text = ""
        for delta in stream.deltas():
            text += delta.text
            for piece in delta.tool_calls:  # the first piece of a call has its name
                print(f"\n[{piece.name}] " if piece.name else "", piece.arguments_json, sep="", end="", flush=True)
        print(f"\n{text}".rstrip())
        if not stream.tool_calls:
            return 0
        messages.append(assistant_turn(text, stream.tool_calls))
        for call in stream.tool_calls:
            result = temperature(**json.loads(call.arguments_json))
            print(f"{call.name} = {result}")
            messages.append(tool_result(call, result))
        answer = client.complete(messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=given.max_tokens)
        print(answer.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
