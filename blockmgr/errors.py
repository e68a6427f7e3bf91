"""What the block manager refuses. Every refusal leaves everything as it was."""


class OutOfBlocks(Exception):
    """Fewer blocks can be had than were asked for.

    wanted: blocks asked for. free: blocks that could be had, unused cached ones included.
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
