"""`python -m octavo_dynamo --target HOST:PORT --model-path FOLDER`."""

import sys
from typing import Any


def main() -> None:
    """Serve until SIGTERM. A user's mistake ends the process with a one-sentence message."""
    try:
        from dynamo.common.backend.run import run
    except ImportError as error:
        sys.exit(f"octavo_dynamo: NVIDIA Dynamo cannot be imported ({error}): docs/dynamo.md says how to install it")
    from octavo_dynamo.engine import OctavoEngine
    from octavo_dynamo.service import StartError

    async def connected(argv: list[str] | None) -> tuple[OctavoEngine, Any]:
        engine, config = await OctavoEngine.from_args(argv)
        await engine.connect()
        return engine, config

    try:
        run(OctavoEngine, engine_factory=connected)
    except StartError as error:
        sys.exit(f"octavo_dynamo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
