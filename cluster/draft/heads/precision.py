"""What of a head must not be rounded when its weights are."""

from __future__ import annotations

from typing import Any, Self

from torch import nn


class PreciseBuffers(nn.Module):
    """Derive a head from this: narrowing it leaves its floating-point buffers as they are.

    They are frequencies of the rotary embedding, whose rounding moves far positions, and biases
    that route tokens to experts, of which the small differences count.
    """

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As `torch.nn.Module.to`."""
        exact = {
            name: buffer.clone()
            for name, buffer in self.named_buffers()
            if buffer.is_floating_point()
        }
        super().to(*args, **kwargs)
        for name, buffer in exact.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, last, buffer.to(getattr(module, last).device))
        return self
