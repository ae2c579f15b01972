"""Muon for the matrices inside the layers and AdamW for the rest, behind one step and one state.

Muon is written out here because PyTorch's orthogonalises in bfloat16 everywhere, which took half of a training step on
a CPU that has no bfloat16 arithmetic.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's quintic, steepest at zero
ITERATIONS = 5


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies matrices of bfloat16 faster than those of float32."""
    return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised momentum of a matrix, sized as AdamW's steps are (arXiv 2502.16982)."""

    def __init__(self, params: Iterable[Tensor], momentum: float = 0.95):
        super().__init__(params, {"lr": 1e-3, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - nobody passes a closure
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(state["momentum"], group["momentum"])
                size = 0.2 * max(weight.shape) ** 0.5
                weight.add_(orthogonalised(ahead), alpha=-group["lr"] * size)


def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix with nearly the singular vectors of `matrix` and singular values near 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x.to(torch.bfloat16) if multiplies_bfloat16(x.device) else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)


class Optimisers:
    """Muon for the matrices inside the layers, AdamW for embedding and norms."""

    def __init__(self, model: nn.Module, adam_share: float = 0.3):
        matrices = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2]
        rest = [p for name, p in model.named_parameters() if not (name.startswith("layers.") and p.ndim == 2)]
        self.adam_share = adam_share
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.97), weight_decay=0.0)

    def step(self, lr: float) -> None:
        """One update at learning rate `lr` (AdamW gets `adam_share` of it); gradients are cleared afterwards."""
        for optimiser, share in ((self.muon, 1.0), (self.adam, self.adam_share)):
            for group in optimiser.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
                group["lr"] = lr * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        """The state of both, for a checkpoint."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """The inverse of `state_dict`."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
