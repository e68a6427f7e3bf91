"""transformers on one device, greedy: outputs and logits that ours are held against.

Must not know: our side.
"""

from pathlib import Path

import numpy as np
import torch


class Reference:
    """transformers on one device, greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
        self.model.eval()
        self.device = device

    def generate(self, prompts: list[np.ndarray], num_output: int) -> list[list[int]]:
        """Outputs, those of one length together."""
        found: dict[int, list[int]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.from_numpy(np.stack([prompts[i] for i in which]).astype(np.int64)).to(self.device)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, min_new_tokens=num_output,
                do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.0,
            )  # fmt: skip
            found |= dict(zip(which, out[:, length:].tolist(), strict=True))
        return [found[i] for i in range(len(prompts))]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 logits behind these tokens, on the CPU."""
        return self.model(torch.tensor([ids], device=self.device), logits_to_keep=1).logits[0, -1].float().cpu()
