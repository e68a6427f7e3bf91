"""A worker's place: one life after the other, each with an epoch of its own, as a supervisor starts them."""

import hashlib
from typing import TYPE_CHECKING

from sim.life import Life
from sim.runner import VOCAB_SIZE, oracle_model
from wire.bundle import bundle_digest
from wire.messages import Capacity, ModelCard, Register

if TYPE_CHECKING:
    from sim.world import World


class Seat:
    """``life`` is None between two lives."""

    def __init__(self, world: "World", index: int, files: dict[str, bytes]) -> None:
        self.name = f"w{index}"
        self.life: Life | None = None
        self._world, self._index, self._files = world, index, files
        self._num_lives = 0
        self._is_closed = False

    @property
    def is_quiet(self) -> bool:
        """It lives, every gateway knows it, and it has nothing to do."""
        life = self.life
        return life is not None and all(life.link.welcomed) and not life.stats.has_work and life.scheduler.is_empty

    def start(self) -> None:
        """A new life."""
        if self._is_closed:
            return
        self._num_lives += 1
        register = self._register()
        self._world.processes.alive.add(register.pid)
        life = self.life = Life(
            self._world.scenario,
            self._world.loop,
            self._world.journal,
            self._world.hubs,
            register,
            self._files,
            on_death=self._died,
            on_step=lambda: self._world.chaos.look(self._index),
        )
        self._world.journal.note(f"{life.name} lives as {register.pid}")

    def crash(self) -> None:
        """SIGKILL."""
        if self.life is not None:
            self.life.kill()
            self._died(-9)

    def close(self) -> None:
        """The end of the play."""
        self._is_closed = True
        if self.life is not None:
            self.life.kill()
            self.life = None

    def _died(self, code: int) -> None:
        life, self.life = self.life, None
        assert life is not None
        self._world.journal.note(f"{life.name} died with {code}")
        self._world.processes.ended(life.register.pid)
        self._world.loop.call_later(self._world.scenario.config.restart_s, self.start)

    def _register(self) -> Register:
        config, pid = self._world.scenario.config, 10_000 * (self._index + 1) + self._num_lives
        fingerprint = hashlib.blake2b(repr(oracle_model(config)).encode(), digest_size=32).hexdigest()
        return Register(
            worker_id=self.name,
            epoch=f"{pid:032x}",
            card=ModelCard(
                name="oracle",
                fingerprint=fingerprint,
                architecture="Oracle",
                dtype="oracle",
                max_model_len=config.max_model_len,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(2,),
                default_sampling={},
                tokenizer_digest=bundle_digest(self._files),
            ),
            capacity=Capacity(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_waiting=config.max_waiting,
                max_batch_tokens=config.max_batch_tokens,
            ),
            pid=pid,
            pid_namespace="sim",
        )
