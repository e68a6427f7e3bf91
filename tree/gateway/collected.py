"""Whole outputs for unary answers, gathered piece by piece. Must not know how a call is answered."""

import time
from dataclasses import dataclass, field

from octavo.v1 import inference_pb2 as pb

from gateway.delivery import count_piece
from gateway.events import BytesById, position_logprobs, whole_calls
from gateway.live import LiveRequest
from gateway.meters import ModelMeters
from gateway.output import Piece
from gateway.stream import OutputStreams
from gateway.text.tool_calls import CallPiece


@dataclass(slots=True)
class Collected:
    """One output, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, piece: Piece, bytes_by_id: BytesById | None) -> None:
        """The next piece. bytes_by_id: for the texts of log-probabilities; None where the caller wants no text."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.calls += piece.tool_calls
        self.logprobs += [position_logprobs(*position, bytes_by_id) for position in piece.logprobs]
        self.prompt_logprobs += [position_logprobs(*position, bytes_by_id) for position in piece.prompt_logprobs]

    def fill(self, target: pb.CompleteResponse | pb.FurtherOutput) -> None:
        """Write the output into the answer."""
        target.text = "".join(self.texts)
        target.token_ids.extend(self.token_ids)
        target.logprobs.extend(self.logprobs)
        target.tool_calls.extend(whole_calls(self.calls))

    def further_output(self, finished: pb.Finished) -> pb.FurtherOutput:
        """As one of the outputs after the first."""
        output = pb.FurtherOutput(finished=finished)
        self.fill(output)
        return output


async def collect(live: LiveRequest, meters: ModelMeters, bytes_by_id: BytesById | None) -> list[Collected]:
    """All outputs, once the last has ended. Raises the RequestError that ended one of them."""
    source, wholes = OutputStreams(live.streams), [Collected() for _ in live.streams]
    while (news := await source.next()) is not None:
        index, piece = news
        if piece is not None:
            wholes[index].add(piece, bytes_by_id)
            count_piece(meters, live, piece, time.monotonic())
    return wholes
