"""Keeps gRPC's C core from writing lines of its own format between ours; import it before grpc. What goes wrong there
reaches us as exceptions and statuses. GRPC_VERBOSITY of the environment wins."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
