"""Multi-token-prediction heads for tiny models: random ones, written beside a checkpoint's weights, and a plain
reference for what they compute, of transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

NAMES = {
    "mtp.fc": "projection",
    "mtp.pre_fc_norm_embedding": "embedding_norm",
    "mtp.pre_fc_norm_hidden": "hidden_norm",
    "mtp.norm": "norm",
    "mtp.layers.0": "layer",
}
"""Of a checkpoint's tensors, and of the modules below."""


class Head(nn.Module):
    """A head with random weights for a model with linear attention."""

    def __init__(self, model: PreTrainedModel, seed: int = 0) -> None:
        super().__init__()
        inner, config = model.model, copy.deepcopy(model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        torch.manual_seed(seed)
        width, eps = config.hidden_size, config.rms_norm_eps
        norm = type(inner.norm)
        self.embedding_norm, self.hidden_norm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.layer = type(inner.layers[0])(config, 0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.05)
        self._model = (model,)  # no part of this one

    @torch.no_grad()
    def forward(self, token_ids: list[int], before: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """The results for tokens that follow one another, and their logits.

        Args:
            before: `[n, hidden]`, the hidden states of the tokens before each.
            window: tokens that each attends to, itself included.
        """
        (model,) = self._model
        output_head = model.get_output_embeddings()
        assert output_head is not None
        embedded = model.get_input_embeddings()(torch.tensor(token_ids))
        rows = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(before)), dim=-1)).unsqueeze(
            0
        )
        positions = torch.arange(len(token_ids)).unsqueeze(0)
        turned = model.model.rotary_emb(rows, positions)
        sees = torch.ones(1, 1, len(token_ids), len(token_ids), dtype=torch.bool).tril()
        sees = sees if window is None else sees.triu(1 - window)
        rows = self.layer(rows, position_embeddings=turned, attention_mask=sees, position_ids=positions)
        results = self.norm(rows if isinstance(rows, Tensor) else rows[0])[0]
        return results, output_head(results)

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them."""
        return {
            f"{stored}.{name}": tensor.contiguous()
            for stored, module in NAMES.items()
            for name, tensor in getattr(self, module).state_dict().items()
        }

    def save(self, directory: Path) -> None:
        """Writes it beside the model's weights."""
        path = directory / "model.safetensors"
        save_file(load_file(path) | self.tensors(), path, metadata={"format": "pt"})


@torch.no_grad()
def hidden_states(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """What the output head gets for each token, `[n, hidden]`."""
    return model.model(torch.tensor([token_ids])).last_hidden_state[0]
