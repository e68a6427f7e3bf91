"""Text as it comes, and where its time went.

python examples/client/streaming.py "Once upon a time" --target 127.0.0.1:50051
"""

import argparse

from octavo import Client, OctavoError


def main(arguments: list[str] | None = None) -> int:
    """Stream one output to stdout. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=60)
    given = parser.parse_args(arguments)
    with Client(given.target) as client:
        try:
            # timeout_s is the call's deadline. With return_partial_on_deadline, the output so far is then the answer.
            with client.stream(
                text=given.prompt, max_tokens=given.max_tokens, timeout_s=60, return_partial_on_deadline=True
            ) as stream:
                for text in stream:
                    print(text, end="", flush=True)
        except OctavoError as error:
            print(f"\n{type(error).__name__}: {error}")
            return 1
    finished = stream.finished
    receipt = finished.receipt
    print(
        f"\n{finished.usage.completion_tokens} tokens, first after {1e3 * receipt.time_to_first_token_s:.1f} ms, "
        f"then every {1e3 * receipt.inter_token_p50_s:.2f} ms (p99 {1e3 * receipt.inter_token_p99_s:.2f} ms), "
        f"{receipt.block_seconds:.3f} block-seconds on {receipt.worker_id}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
