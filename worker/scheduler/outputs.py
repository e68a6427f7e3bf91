"""What goes back to the gateways after a step, grouped so that each gets one message.

Knows no wire format but the `Finished` and `TokenLogprobs` structs that travel inside.

Shapes: N new tokens of this step
"""

from dataclasses import dataclass, field

import numpy as np

from octavo.wire.messages import Finished, TokenLogprobs
from octavo.worker.engine.interfaces import GatewayIndex
from octavo.worker.scheduler.request import RequestKey

_NO_HANDLES = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayOutput:
    """News for one gateway. handles_N int64 and tokens_N int32 are aligned; ``finished`` comes after them.

    started: handles scheduled for the first time. logprobs: by handle, one per token of that handle. embeddings: by
    handle, float32 [hidden size]. prompt_logprobs: by handle, what follows what was told before.
    """

    handles_N: np.ndarray = field(default_factory=lambda: _NO_HANDLES)
    tokens_N: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    started: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


StepOutputs = dict[GatewayIndex, GatewayOutput]
"""By gateway; only those with news."""


class OutputBuffer:
    """Collects news until somebody takes them."""

    def __init__(self) -> None:
        self._tokens: dict[GatewayIndex, tuple[np.ndarray, np.ndarray]] = {}
        self._logprobs: dict[GatewayIndex, dict[int, list[TokenLogprobs]]] = {}
        self._started: dict[GatewayIndex, list[int]] = {}
        self._finished: dict[GatewayIndex, list[Finished]] = {}
        self._embeddings: dict[GatewayIndex, dict[int, np.ndarray]] = {}
        self._prompt_logprobs: dict[GatewayIndex, dict[int, list[TokenLogprobs]]] = {}

    def put_tokens(self, gateways_N: np.ndarray, handles_N: np.ndarray, tokens_N: np.ndarray) -> None:
        """The new tokens of one step; at most once before each ``take``."""
        if not len(gateways_N):
            return
        if (gateways_N == gateways_N[0]).all():
            self._tokens[GatewayIndex(int(gateways_N[0]))] = (handles_N, tokens_N)
            return
        for gateway in np.unique(gateways_N).tolist():
            is_its_N = gateways_N == gateway
            self._tokens[GatewayIndex(gateway)] = (handles_N[is_its_N], tokens_N[is_its_N])

    def put_logprobs(self, key: RequestKey, logprobs: TokenLogprobs) -> None:
        """For one of the tokens put in this step."""
        self._logprobs.setdefault(key.gateway, {}).setdefault(key.handle, []).append(logprobs)

    def put_prompt_logprobs(self, key: RequestKey, logprobs: list[TokenLogprobs]) -> None:
        """For the next positions of the prompt."""
        self._prompt_logprobs.setdefault(key.gateway, {}).setdefault(key.handle, []).extend(logprobs)

    def put_embedding(self, key: RequestKey, embedding_D: np.ndarray) -> None:
        """The vector of a request that ends in this step. float32."""
        self._embeddings.setdefault(key.gateway, {})[key.handle] = embedding_D

    def put_started(self, key: RequestKey) -> None:
        """An output was scheduled for the first time."""
        self._started.setdefault(key.gateway, []).append(key.handle)

    def put_finished(self, gateway: GatewayIndex, finished: Finished) -> None:
        """An output ended."""
        self._finished.setdefault(gateway, []).append(finished)

    def forget(self, gateway: GatewayIndex) -> None:
        """Nobody is there to be told."""
        for news in (
            self._tokens, self._logprobs, self._started, self._finished, self._embeddings, self._prompt_logprobs,
        ):  # fmt: skip
            news.pop(gateway, None)  # type: ignore[attr-defined]

    def take(self) -> StepOutputs:
        """All news since the last call."""
        gateways = {*self._tokens, *self._started, *self._finished, *self._prompt_logprobs}
        if not gateways:
            return {}
        outputs = {gateway: self._of(gateway) for gateway in sorted(gateways)}
        self._tokens, self._logprobs, self._started, self._finished = {}, {}, {}, {}
        self._embeddings, self._prompt_logprobs = {}, {}
        return outputs

    def _of(self, gateway: GatewayIndex) -> GatewayOutput:
        handles_N, tokens_N = self._tokens.get(gateway, (_NO_HANDLES, _NO_TOKENS))
        return GatewayOutput(
            handles_N=handles_N,
            tokens_N=tokens_N,
            logprobs=self._logprobs.get(gateway, {}),
            started=tuple(self._started.get(gateway, ())),
            finished=tuple(self._finished.get(gateway, ())),
            embeddings=self._embeddings.get(gateway, {}),
            prompt_logprobs=self._prompt_logprobs.get(gateway, {}),
        )
