"""Checkpoints that whole services are started on."""

from pathlib import Path

import pytest

from tests.support.model.checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 0.2 M parameters."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False, vocab_size=320)
