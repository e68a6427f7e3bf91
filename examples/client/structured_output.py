"""An answer that a program can read: JSON of a schema, one of several words, a text of a pattern.

python examples/client/structured_output.py --target 127.0.0.1:50051
"""

import argparse
import json

from octavo import Client, InvalidRequest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "string", "format": "date"},
        "trade": {"enum": ["baker", "sailor", "smith"]},
    },
    "required": ["name", "born", "trade"],
    "additionalProperties": False,
}


def main(arguments: list[str] | None = None) -> int:
    """Ask for three constrained answers, and for one that is refused. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    given = parser.parse_args(arguments)
    with Client(given.target) as client:
        question = [("user", "Invent somebody.")]
        answer = client.complete(messages=question, json_schema=PERSON, max_tokens=200)
        print(json.loads(answer.text))
        print(client.complete(messages=[("user", "Is the sea wet?")], choice=["yes", "no"]).text)
        print(client.complete(text="A number to call: ", regex=r"0[0-9]{2}-[0-9]{4}").text)
        try:
            client.complete(messages=question, json_schema={"type": "array", "contains": {"const": 1}})
        except InvalidRequest as refused:
            print(f"refused: {refused.violations[0].field}: {refused.violations[0].description}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
