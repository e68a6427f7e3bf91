"""Models whose outputs tests constrain: a tiny one with random weights, the embedded one, and the oracle."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from octavo.model import CausalLM, ModelConfig, load_model
from octavo.worker.config import SchedulerConfig
from octavo.worker.grammar.vocabulary import Vocabulary, load_vocabulary
from octavo.worker.loading.model_card import describe
from octavo.worker.runners.interface import Runner
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.oracle.runner import OracleRunner
from octavo.worker.runners.oracle.tokenizer import END_TOKEN_ID, oracle_tokenizer_files
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from tests.support.grammar.rig import GrammarRig
from tests.support.model.checkpoints import train_tokenizer

BLOCK_SIZE = 16
TINY = ModelConfig(
    vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Speaker:
    """A tokenizer, and how to make runners for it. model None: the oracle."""

    model: CausalLM | None
    files: dict[str, bytes]
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, for looking at texts."""
        return Tokenizer.from_str(self.files["tokenizer.json"].decode())

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of an output, without the token that ends it."""
        ids = list(token_ids)
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary that grammars are compiled for."""
        return load_vocabulary(self.files, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)

    def rig(
        self, *, num_seqs: int = 32, num_blocks: int | None = None, max_in_flight: int = 1, **more: object
    ) -> GrammarRig:
        """An engine with its own runner."""
        num_blocks = num_blocks or num_seqs * 32
        scheduler = SchedulerConfig(
            max_model_len=512,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_num_seqs=num_seqs,
            max_waiting=10_000,
            max_batch_tokens=1024,
            max_in_flight=max_in_flight,
        )
        runner = self.runner(num_seqs=num_seqs, num_blocks=num_blocks, max_in_flight=max_in_flight)
        return GrammarRig(
            runner,
            self.vocabulary,
            scheduler,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            **more,  # type: ignore[arg-type]
        )

    def runner(self, *, num_seqs: int, num_blocks: int, max_in_flight: int) -> Runner:
        """A torch runner, or the oracle."""
        if self.model is None:
            return OracleRunner(
                OracleModel(vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids),
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_slots=num_seqs,
                max_blocks_per_slot=512 // BLOCK_SIZE,
                max_in_flight=max_in_flight,
            )
        config = TorchRunnerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_slots=num_seqs,
            max_model_len=512,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_in_flight=max_in_flight,
        )
        return TorchRunner(self.model, config)


def tiny_speaker() -> Speaker:
    """Random weights, 320 tokens: outputs have bytes of nearly every script, and split characters."""
    tokenizer = train_tokenizer(320)
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    end = (int(tokenizer.token_to_id("<|im_end|>")),)
    return Speaker(CausalLM.random(TINY, seed=4), files, tokenizer.get_vocab_size(), end)


def folder_speaker(folder: Path) -> Speaker:
    """A speaker of the checkpoint in this folder."""
    described = describe(folder)
    return Speaker(load_model(folder), described.files, described.vocab_size, described.eos_token_ids)


def oracle_speaker(vocab_size: int = 400) -> Speaker:
    """A speaker without a model: hashes choose among the allowed tokens."""
    return Speaker(None, oracle_tokenizer_files(vocab_size), vocab_size, (END_TOKEN_ID,))


def as_json(schema: object) -> str:
    """A schema as text."""
    return json.dumps(schema)
