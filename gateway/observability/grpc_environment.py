"""What gRPC's C core is told by the environment, which wins; import it before grpc.

It writes no lines of its own format between ours: what goes wrong there reaches us as exceptions and statuses. And it
leaves processes alone that are started from here. With its support of forks, which is its default, it starts threads of
its own in such a process in the moment before that becomes another program; now and then they end it there.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
