"""Four ways to stop: leave the block, cancel the task, cancel by id, run out of time. The memory is free a step later.

python examples/client/cancellation.py --target 127.0.0.1:50051
"""

import argparse
import asyncio

from octavo import AsyncClient, Cancelled, Client, DeadlineExceeded

PROMPT = "Count to a million: one, two,"


def leave_early(target: str) -> int:
    """Read some tokens, then leave the block. Returns the number of the last piece read."""
    with Client(target) as client, client.stream(text=PROMPT, ignore_eos=True) as stream:
        for number, _ in enumerate(stream.deltas()):
            if number == 5:
                return number
    return 0


async def cancel_a_task(target: str) -> bool:
    """Cancel the task, as a web handler does when its caller has disconnected. Returns whether it was cancelled."""
    async with AsyncClient(target) as client:
        task = asyncio.create_task(client.complete(text=PROMPT, ignore_eos=True))
        await asyncio.sleep(0.2)
        task.cancel()
        return isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


def cancel_by_id(target: str) -> str:
    """Cancel by id, from anywhere: another client, another process, `octavo cancel ID`. Returns the error's reason."""
    with Client(target) as client, Client(target) as elsewhere, client.stream(text=PROMPT, ignore_eos=True) as stream:
        next(stream.deltas())
        elsewhere.cancel(stream.started.request_id)
        try:
            for _ in stream.deltas():
                pass
        except Cancelled as error:
            return error.reason
    return "done"


def run_out_of_time(target: str) -> tuple[str, int]:
    """At the deadline a call fails, or returns a partial answer. Returns the reason of the error, and the number of
    tokens of the partial answer."""
    with Client(target) as client:
        try:
            client.complete(text=PROMPT, ignore_eos=True, timeout_s=0.3)
        except DeadlineExceeded as error:
            reason = error.reason
        else:
            reason = "done"
        partial = client.complete(text=PROMPT, ignore_eos=True, timeout_s=0.5, return_partial_on_deadline=True)
        return reason, partial.finished.usage.completion_tokens


def main(arguments: list[str] | None = None) -> int:
    """Show all four. Returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    target = parser.parse_args(arguments).target
    print(f"left after piece {leave_early(target)}")
    print(f"the task was cancelled: {asyncio.run(cancel_a_task(target))}")
    print(f"cancelled by id: {cancel_by_id(target)}")
    reason, num_tokens = run_out_of_time(target)
    print(f"out of time: {reason or 'DEADLINE'}; with a partial answer: {num_tokens} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
