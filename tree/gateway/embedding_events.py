"""Vectors as messages of octavo.v1."""

import numpy as np
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

from gateway.embedding_sink import Embedded
from wire.messages import ModelCard


def embedding_message(each: Embedded, card: ModelCard, arrived_s: float, *, is_scaled: bool) -> pb.Embedding:
    """arrived_s: of the call, monotonic. is_scaled: to length 1."""
    figures = each.figures
    return pb.Embedding(
        values=(normalized(each.vector_D) if is_scaled else each.vector_D).tolist(),
        usage=common_pb2.Usage(prompt_tokens=each.num_prompt_tokens, cached_tokens=figures.cached_tokens),
        receipt=common_pb2.Receipt(
            worker_id=each.worker_id,
            model_fingerprint=card.fingerprint,
            gateway_s=each.sent_s - arrived_s,
            queue_s=figures.queue_s,
            prefill_s=figures.prefill_s,
            total_s=each.ended_s - arrived_s,
            computed_tokens=figures.computed_tokens,
            preemptions=figures.preemptions,
            block_seconds=figures.block_seconds,
            migrations=each.num_moves,
        ),
    )


def normalized(vector_D: np.ndarray) -> np.ndarray:
    """float32, of length 1; a vector of zeros stays what it is."""
    length = float(np.linalg.norm(vector_D.astype(np.float64)))
    return vector_D if length == 0.0 else (vector_D / length).astype(np.float32)
