"""LoadService: what the service is doing, for routers and people."""

from contextlib import aclosing

from octavo.gateway.peers.control import Control
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.rpc.connections import Context
from octavo.gateway.validation.fields import check
from octavo.gateway.watching.watch import LoadWatch
from octavo.v1 import load_pb2 as pb
from octavo.v1 import load_pb2_grpc


class LoadServicer(load_pb2_grpc.LoadServiceServicer):
    """One per gateway."""

    def __init__(self, watch: LoadWatch, control: Control, tracker: RequestTracker) -> None:
        self._watch = watch
        self._control = control
        self._tracker = tracker

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> None:
        """A snapshot at once, then one per interval. Each is made once the previous one was taken, so none queue up."""
        check(request)
        async with aclosing(self._watch.snapshots(self._control, request)) as snapshots:
            async for snapshot in snapshots:
                await self._tracker.write(context, snapshot)
