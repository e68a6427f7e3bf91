"""`octavo cancel`: ends a request of one's own."""

import sys

from cli.connect import connect
from cli.settings import ClientSettings


def cancel(settings: ClientSettings, request_id: str) -> int:
    """Print what became of it; 0 where it was in flight, 1 where it was not, or may go on."""
    with connect(settings) as client:
        response = client.cancel(request_id)
    print("cancelled" if response.found else "not in flight")  # noqa: T201
    if response.num_unreachable_gateways:
        print(  # noqa: T201
            f"{response.num_unreachable_gateways} gateways did not answer, where it may go on: cancel again",
            file=sys.stderr,
        )
        return 1
    return 0 if response.found else 1
