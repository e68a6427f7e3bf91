"""`python -m octavo_dynamo --target HOST:PORT --model-path FOLDER`."""

import sys
from typing import Any


def main() -> None:
    """Serve until SIGTERM. A user's mistake ends with one sentence."""
    try:
        from dynamo.common.backend.run import run
    except ImportError as error:
        sys.exit(f"octavo_dynamo: NVIDIA Dynamo cannot be imported ({error}): docs/dynamo.md says how to install it")
    from octavo_dynamo.engine import OctavoEngine

    engines: list[OctavoEngine] = []

    async def make(argv: list[str] | None) -> tuple[OctavoEngine, Any]:
        engine, config = await OctavoEngine.from_args(argv)
        engines.append(engine)
        return engine, config

    try:
        run(OctavoEngine, engine_factory=make)
    except Exception:
        for engine in engines:
            if engine.failure is not None:  # Dynamo passes on its text alone
                sys.exit(f"octavo_dynamo: {engine.failure}")
        raise


if __name__ == "__main__":
    main()
