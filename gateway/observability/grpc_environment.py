"""Environment variables for gRPC's C core, unless the environment sets them already; import this before grpc.

No log lines in gRPC's own format: errors reach us as exceptions and statuses anyway. And no fork support, which is on
by default: in a child process it starts threads just before the child executes its program, and now and then they
crash it.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
