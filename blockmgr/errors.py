"""Refusals of the block manager. Every refusal leaves everything as it was."""


class OutOfBlocks(Exception):
    """There are fewer blocks than were requested.

    wanted: blocks requested. free: blocks available, including unused cached ones.
    """

    def __init__(self, *, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class OutOfSlots(Exception):
    """Every row of the block table is taken."""

    def __init__(self, *, max_slots: int) -> None:
        super().__init__(f"all {max_slots} slots are taken")
        self.max_slots = max_slots
