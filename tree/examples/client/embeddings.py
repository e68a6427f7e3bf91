"""Which texts are like which: vectors of the model's last hidden state, compared by cosine.

python examples/client/embeddings.py "a red fox" "a small wolf" "the stock market" --target 127.0.0.1:50051
"""

import argparse

from octavo import Client


def main(arguments: list[str] | None = None) -> int:
    """Print a table of similarities. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", default=["a red fox", "a small wolf", "the stock market"])
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--pooling", choices=["last_token", "mean"], default="mean")
    given = parser.parse_args(arguments)
    with Client(given.target) as client:
        response = client.embed(given.texts, pooling=given.pooling, timeout_s=60)
    vectors = [each.values for each in response.embeddings]  # of length 1
    for text, vector, each in zip(given.texts, vectors, response.embeddings, strict=True):
        row = " ".join(f"{sum(a * b for a, b in zip(vector, other, strict=True)):6.3f}" for other in vectors)
        print(f"{row}   {text} ({each.usage.prompt_tokens} tokens, {len(vector)} dimensions)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
