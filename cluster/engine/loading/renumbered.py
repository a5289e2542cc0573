"""A draft model whose tokens are numbered anew, of which it writes the first only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.config.schema import EngineConfig
from cluster.errors import ConfigError
from cluster.records import record


@record
class Numbering:
    """order: int64[vocab], the model's own id of each id.  num_columns: of its logits, those of the
    first ids."""

    order: npt.NDArray[np.int64]
    num_columns: int

    def check(self, config: EngineConfig) -> None:
        """Raise ConfigError for a model whose rows cannot be chosen."""
        for key, is_set in (
            ("tensor_parallel", config.tensor_parallel > 1),
            ("quantization", config.quantization is not None),
        ):
            if is_set:
                raise ConfigError(
                    f"{key}: a draft model of another vocabulary writes a part of its own, which "
                    "is not built for this; leave it out",
                    param=key,
                )

    def apply(self, module: Any) -> None:
        """Bring the rows of a transformers model's embedding and output layer into this order."""
        order = torch.from_numpy(self.order)
        embedding, output = module.get_input_embeddings(), module.get_output_embeddings()
        written = order[: self.num_columns].to(output.weight.device)
        # Before the embedding: the two may be one tensor.
        output.weight = _chosen(output.weight, written)
        if getattr(output, "bias", None) is not None:
            output.bias = _chosen(output.bias, written)
        output.out_features = self.num_columns
        embedding.weight = _chosen(embedding.weight, order.to(embedding.weight.device))


def _chosen(weight: torch.Tensor, rows: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach().index_select(0, rows), requires_grad=False)
