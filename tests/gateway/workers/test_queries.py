"""Questions to workers that are under way."""

import asyncio

from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.queries import Queries
from octavo.gateway.workers.registry import WorkerRecord
from octavo.gateway.workers.views import WorkerState
from octavo.wire.messages import AdminQuery, AdminReply, Message
from tests.support.gateway.workers import register

EPOCH = "e" * 32


async def test_a_question_that_could_not_be_sent_is_not_kept() -> None:
    worker = WorkerRecord.of(
        register("w0", EPOCH), incarnation=7, peer=Peer(0, b"p"), state=WorkerState.READY, now_s=0.0
    )
    queries, sent = Queries(), list[Message]()

    def fail_to_send(record: WorkerRecord, message: Message) -> bool:
        sent.append(message)
        return False

    assert await queries.ask([worker], fail_to_send, AdminQuery(query_id=0, audit=True), timeout_s=1.0) == []
    await asyncio.sleep(0)
    (question,) = sent
    assert isinstance(question, AdminQuery)
    assert not queries.take(worker.incarnation, AdminReply(epoch=EPOCH, query_id=question.query_id))
