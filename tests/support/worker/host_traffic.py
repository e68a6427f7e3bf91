"""Random traffic for a small pool with a second tier: shared prefixes that come again, forks, cancels, pauses,
preemptions. Everything follows from the seed."""

import random

from tests.support.worker.scheduling import World


def drive(world: World, seed: int, *, num_events: int = 120, vocab_size: int = 50) -> None:
    """Run until every output has ended. Raises AssertionError if a plan or the blocks are wrong."""
    rng = random.Random(seed)
    block_size, longest = world.config.block_size, world.config.max_model_len // 2
    openings = [
        [rng.randrange(3, vocab_size) for _ in range(rng.randint(block_size, longest - block_size))] for _ in range(5)
    ]
    handle = 0
    for _ in range(num_events):
        event = rng.random()
        if event < 0.3:
            handle += 1
            opening = rng.choice(openings)
            prompt = opening[: rng.randint(1, len(opening))] if rng.random() < 0.2 else opening
            prompt = [*prompt, *(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, block_size)))]
            world.add(
                handle,
                prompt,
                max_tokens=rng.randint(1, 10),
                salt=rng.choice(["", "", "", "other"]),
                priority=rng.choice([0, 0, 1]),
                num_outputs=rng.choice([1, 1, 1, 2, 3]),
                temperature=rng.choice([0.0, 0.8]),
            )
        elif event < 0.36 and handle:
            world.cancel(rng.randint(1, handle))
        elif event < 0.42 and handle:
            world.pause(rng.randint(1, handle))
        elif event < 0.48:
            world.resume_all()
        elif event < 0.58:
            running = world.scheduler.requests.running
            if running:
                world.scheduler.requests.preempt(rng.choice(running), world.now_s)
        elif event < 0.62 and world.plans:
            world.collect()
        else:
            world.step()
        assert world.blocks.audit().violations == ()
    world.resume_all()
    world.run()
    world.resume_all()
    world.run()
    world.check_quiet()
