"""What a step knows of every row, kept on the device from step to step.

A row is a request's stable place. A decode step reads and moves the rows by kernels; the host sends only what changes:
joins and new blocks. The last row is scratch: batches are padded with it, and its block belongs to nobody.

Legend: R rows (the runner's slots and one more) · M table width.
"""

import torch


class RowState:
    """position_R: tokens in the cache, which is where the row's last token will be written.

    last_token_R, position_R, num_prompt_R, table_RM: int32. temperature_R: float32, 0 is greedy. seed_R: int64 (bits of
    a uint64).
    """

    def __init__(self, *, num_slots: int, table_width: int, scratch_block: int, device: torch.device | str) -> None:
        R = num_slots + 1
        self.scratch_row = num_slots
        self.last_token_R = torch.zeros(R, dtype=torch.int32, device=device)
        self.position_R = torch.zeros(R, dtype=torch.int32, device=device)
        self.num_prompt_R = torch.zeros(R, dtype=torch.int32, device=device)
        self.temperature_R = torch.zeros(R, dtype=torch.float32, device=device)
        self.seed_R = torch.zeros(R, dtype=torch.int64, device=device)
        self.table_RM = torch.full((R, table_width), scratch_block, dtype=torch.int32, device=device)
