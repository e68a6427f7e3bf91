"""Shapes of the published Qwen2.5 models and of a tiny one, and the modes, by their names on the command line.

Letters: D model dim · I intermediate · N query heads · K kv heads · H head dim · V embedding rows.
Must not know: devices, weights.
"""

from dataclasses import dataclass

from octavo.model.config import ModelConfig
from octavo.worker.config import Deterministic

NUM_IDS = 151_665
"""Ids of Qwen2.5's tokenizer; further rows of the embedding are padding."""
MAX_POSITIONS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """num_ids: of the tokenizer. tied: the output head shares the embedding's weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 151_936
    num_ids: int = NUM_IDS
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """H."""
        return self.hidden_size // self.num_heads

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rope_theta=1e6,
            tie_word_embeddings=self.tied,
        )


PUBLISHED = {
    "0.5B": Shape(hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2),
    "1.5B": Shape(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2),
    "3B": Shape(hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16, num_kv_heads=2),
    "7B": Shape(
        hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4, vocab_size=152_064,
        tied=False,
    ),
    "14B": Shape(
        hidden_size=5120, intermediate_size=13824, num_layers=48, num_heads=40, num_kv_heads=8, vocab_size=152_064,
        tied=False,
    ),
    "32B": Shape(
        hidden_size=5120, intermediate_size=27648, num_layers=64, num_heads=40, num_kv_heads=8, vocab_size=152_064,
        tied=False,
    ),
    "72B": Shape(
        hidden_size=8192, intermediate_size=29568, num_layers=80, num_heads=64, num_kv_heads=8, vocab_size=152_064,
        tied=False,
    ),
}  # fmt: skip
TINY = Shape(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=10_240, num_ids=10_100
)
SHAPES = {"tiny": TINY, **PUBLISHED}
MODES = {"fast": Deterministic.OFF, "deterministic": Deterministic.ON}
