"""Events of an octavo.v1 stream as the dicts that Dynamo's frontend reads. Pure; knows no Dynamo."""

from collections.abc import Collection
from typing import Any

from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_TOOL_CALLS: "stop",  # the frontend finds the calls itself
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",
}


class Chunks:
    """The chunks of one request. ends: tokens that end its output. names_by_id: write tokens as `token_id:7` instead of
    their text.

    A chunk whose last token is one of `ends` is held until the next event: Dynamo's frontend stops reading at such a
    token and would never see the usage.
    """

    def __init__(self, *, ends: Collection[int] = (), names_by_id: bool = False) -> None:
        self._ends = frozenset(ends)
        self._names_by_id = names_by_id
        self._held: dict[str, Any] | None = None
        self._prompt_scores: list[pb.TokenLogprobs] = []
        self.usage: common_pb2.Usage | None = None
        """Set once the output has ended."""

    def of(self, response: pb.GenerateResponse) -> list[dict[str, Any]]:
        """The chunks that are ready after this event."""
        held, self._held = self._held, None
        ready = [held] if held is not None else []
        match response.WhichOneof("event"):
            case "delta":
                chunk = self._delta(response.delta)
                if chunk is not None and chunk["token_ids"][-1] in self._ends:
                    self._held = chunk
                elif chunk is not None:
                    ready.append(chunk)
            case "finished":
                last = ready.pop() if ready else {"token_ids": [], "index": 0}
                ready.append(last | self._finished(response.finished))
        return ready

    def cancelled(self) -> dict[str, Any]:
        """The last chunk of a request that its caller cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled"}

    def _delta(self, delta: pb.Delta) -> dict[str, Any] | None:
        self._prompt_scores.extend(delta.prompt_logprobs)
        if not delta.token_ids:
            return None
        chunk: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": 0}
        if delta.logprobs:
            chunk["log_probs"] = [each.chosen.logprob for each in delta.logprobs]
            chunk["top_logprobs"] = [self._candidates(each) for each in delta.logprobs]
        return chunk

    def _candidates(self, scores: pb.TokenLogprobs) -> list[dict[str, Any]]:
        """The most probable tokens by rank; only the chosen one if none were asked for."""
        return [
            {"rank": rank, "token_id": each.token_id, "token": self._name(each), "logprob": each.logprob}
            for rank, each in enumerate(scores.top or [scores.chosen], start=1)
        ]

    def _name(self, score: pb.TokenLogprob) -> str:
        return f"token_id:{score.token_id}" if self._names_by_id else score.text

    def _finished(self, finished: pb.Finished) -> dict[str, Any]:
        self.usage = usage = finished.usage
        chunk: dict[str, Any] = {
            "finish_reason": _REASONS[finished.reason],
            "completion_usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }
        match finished.stop.WhichOneof("match"):
            case "token_id":
                chunk["stop_reason"] = finished.stop.token_id
            case "text":
                chunk["stop_reason"] = finished.stop.text
        if self._prompt_scores:
            chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs()}
        return chunk

    def _prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """For each prompt token, the candidates by token id; None for the first token, which has none."""
        positions: list[dict[str, Any] | None] = [None]
        for scores in self._prompt_scores:
            entries = {
                str(each.token_id): {"logprob": each.logprob, "rank": rank, "decoded_token": self._name(each)}
                for rank, each in enumerate(scores.top, start=1)
            }
            chosen = scores.chosen
            entries.setdefault(str(chosen.token_id), {"logprob": chosen.logprob, "decoded_token": self._name(chosen)})
            positions.append(entries)
        return positions
