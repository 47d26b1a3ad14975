"""Temperature: flatten or sharpen a row."""

from __future__ import annotations

import torch

MIN_TEMPERATURE = 1e-5  # below this a float32 row has one token left anyway, and the division could overflow


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits [R, V] by a temperature above 0, in place, after moving each row's maximum to 0.

    The shift changes no probability and keeps the quotient from overflowing upwards.
    """
    logits -= logits.amax(dim=-1, keepdim=True)
    if temperature != 1.0:
        logits /= max(temperature, MIN_TEMPERATURE)
    return logits
