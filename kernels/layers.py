"""The operations of a decoder besides attention: projections with the norm before them, norms and gates, the gated MLP,
the choice of experts, and rotation.

Each is computed by PyTorch operations or, for a step (at most `STEP_ROWS` rows) on a CPU, by one call of a compiled
kernel (`cpu/source/layers`), because dispatching PyTorch operations would take most of the time. With the compiled
kernels, the result of a row is the same, bit by bit, however many rows come with it. PyTorch's products use another
arithmetic for another number of rows, unless rows are padded (`selection.padded_rows`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.attention import compiled_attention
from .cpu.calls import call, threads
from .cpu.library import Level, QuantisedCall, cpu_level, loaded
from .selection import STEP_ROWS, TILE_ROWS, selected


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    onto: Tensor | None = None,
) -> Tensor:
    """Multiplies `x`, or the RMS norm of `x` if `norm` is given, by the transpose of `weight`, and adds `bias`.

    Args:
        x: `[n, inputs]`.
        weight: `[outputs, inputs]`, contiguous.
        bias: `[outputs]`.
        norm: `[inputs]`, the weight of an RMS norm over `x` with `eps`; see `rms_norm` for a norm in another dtype.
        onto: `[n, outputs]`, must not overlap `x`: the product, in `x`'s dtype, is added to it.

    Returns:
        `[n, outputs]` in `x`'s dtype: `onto`, if that is given.

    Raises:
        MemoryError: no memory for the temporaries of a compiled kernel.
    """
    if norm is not None and norm.dtype != x.dtype:
        x, norm = rms_norm(x, norm, eps), None
    kernels = _kernels_for(x, weight, bias, norm) if _takes_sums(onto, x) else None
    if kernels is None:
        product = _by_tiles(
            lambda rows: F.linear(rows if norm is None else F.rms_norm(rows, norm.shape, norm, eps), weight, bias), x
        )
        return product if onto is None else onto.add_(product)
    outputs, inputs = weight.shape
    given = weight.data_ptr(), _address(bias), None, 1
    return _normed(kernels.triforce_linear, x, norm, eps, given, onto, (inputs, outputs), outputs)


def held_linear(
    x: Tensor,
    held: ctypes.Array[QuantisedCall],
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    onto: Tensor | None = None,
) -> Tensor | None:
    """`linear` in bfloat16 with matrices in few bits, for the rows of a step.

    The outputs of the matrices follow one another. Their numbers are expanded during the product. The result is that of
    `linear` with the expanded numbers, bit by bit if all of them are finite. `None` if no compiled kernel can compute
    it.
    """
    inputs, outputs = held[0].inputs, sum(one.outputs for one in held)
    kernels = _kernels_for_held(x, inputs, onto, bias, norm)
    if kernels is None:
        return None
    given = None, _address(bias), held, len(held)
    return _normed(kernels.triforce_linear, x, norm, eps, given, onto, (inputs, outputs), outputs)


def held_gated_mlp(
    x: Tensor, norm: Tensor | None, eps: float, held: ctypes.Array[QuantisedCall], *, onto: Tensor | None = None
) -> Tensor | None:
    """`gated_mlp` in bfloat16 with gate, up and down matrices in few bits, with or without a norm; see
    `held_linear`."""
    gate, up, down = held
    kernels = _kernels_for_held(x, gate.inputs, onto, norm)
    if kernels is None or (up.inputs, up.outputs, down.inputs) != (gate.inputs, gate.outputs, gate.outputs):
        return None
    given = None, None, held
    return _normed(kernels.triforce_gated_mlp, x, norm, eps, given, onto, (gate.inputs, gate.outputs), down.outputs)


def choose_experts(x: Tensor, router: Tensor, used: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row of `x` `[n, hidden]`.

    They are the `used` experts with the highest probabilities, in descending order; of equal ones, the first comes
    first. The probabilities are the softmax of the product with `router`. Products and probabilities are float32.

    Args:
        router: float32 `[experts, hidden]`, contiguous.
        normalised: whether the shares of a row are divided by their sum, so that they sum to 1.

    Returns:
        The shares (float32) and the numbers (int64) of each row's experts, both `[n, used]`.

    Raises:
        MemoryError: no memory for the temporaries of a compiled kernel.
    """
    fits = len(x) <= STEP_ROWS and x.is_contiguous() and router.dtype == torch.float32 and router.is_contiguous()
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is None:
        likely = linear(x.float(), router).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        shares = likely.values[:, :used]
        return shares / shares.sum(dim=-1, keepdim=True) if normalised else shares, likely.indices[:, :used]
    shares, ids = (torch.empty(len(x), used, dtype=kind) for kind in (torch.float32, torch.int64))
    failed = call(
        kernels.triforce_choose_experts,
        *(x.data_ptr(), *x.shape, x.dtype == torch.bfloat16, router.data_ptr(), len(router), used, normalised),
        *(ids.data_ptr(), shares.data_ptr(), cpu_level(), threads()),
    )
    if failed:
        raise MemoryError(f"no memory for the temporaries of {x.shape[0]} rows")
    return shares, ids


def held_expert_mlps(
    x: Tensor, experts: ctypes.Array[QuantisedCall], ids: Tensor, shares: Tensor, *, onto: Tensor | None = None
) -> Tensor | None:
    """Computes a mixture of experts that are in few bits, in bfloat16, for the rows of a step.

    The result of each of a row's experts (see `held_gated_mlp`) is multiplied by its share. The products are summed in
    float32, in the order of the experts' numbers. The sum is then rounded.

    Args:
        x: `[n, hidden]`, contiguous.
        experts: gate, up and down of each expert, all of the same sizes.
        ids: int64 `[n, used]`, contiguous: the numbers of each row's experts.
        shares: float32 `[n, used]`, contiguous: the shares of these experts.
        onto: `[n, hidden]`, must not overlap `x`: the result is added to it.

    Returns:
        `[n, hidden]`: `onto`, if that is given; `None` if no compiled kernel can compute it.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    gate, hidden = experts[0], x.shape[1]
    kernels = _kernels_for_held(x, gate.inputs, onto) if x.is_contiguous() else None
    if kernels is None:
        return None
    out = torch.empty_like(x) if onto is None else onto
    failed = call(
        kernels.triforce_expert_mlps,
        *(x.data_ptr(), x.shape[0], hidden, gate.outputs, experts, len(experts) // 3),
        *(ids.data_ptr(), shares.data_ptr(), ids.shape[1], out.data_ptr(), onto is not None, cpu_level(), threads()),
    )
    if failed:
        raise MemoryError(f"no memory for the temporaries of {x.shape[0]} rows")
    return out


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The RMS norm over the last dimension of `x` `[n, width]` or `[heads, n, width]`, times `norm` `[width]`, in `x`'s
    dtype. If `norm` is float32, rounding to `x`'s dtype comes after the multiplication."""
    fits = x.dim() in (2, 3) and x.shape[-2] <= STEP_ROWS and x.stride(-1) == 1
    fits = fits and norm.shape == x.shape[-1:] and norm.is_contiguous()
    fits = fits and norm.dtype in (x.dtype, torch.float32)
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is not None:
        out = torch.empty(x.shape, dtype=x.dtype)
        heads, head_stride = (len(x), x.stride(0)) if x.dim() == 3 else (1, 0)
        call(
            kernels.triforce_rms_norm,
            *(x.data_ptr(), head_stride, x.stride(-2), norm.data_ptr(), norm.dtype == torch.bfloat16, eps),
            *(out.data_ptr(), heads, *x.shape[-2:], x.dtype == torch.bfloat16, threads()),
        )
        return out
    if norm.dtype == x.dtype:
        return F.rms_norm(x, norm.shape, norm, eps)
    return F.rms_norm(x.to(norm.dtype), norm.shape, norm, eps).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`up` times the activation of `gate`, both `[n, width]`; `activation` is `silu`, or `gelu_pytorch_tanh`.

    On a CPU, PyTorch computes the end of each thread's part with other instructions, so the bits of a row could depend
    on the other rows. If they must not, rows are activated one at a time.
    """
    activate = F.silu if activation == "silu" else functools.partial(F.gelu, approximate="tanh")
    return by_rows(activate, gate).mul_(up)


def by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """`x` `[n, width]` times the sigmoid of `gate`, `[n, width]` or `[n, 1]`; see `gated`."""
    # Contiguity may depend on the number of rows, so it must not decide which implementation is used.
    gate = gate.contiguous()
    fits = len(x) <= STEP_ROWS and x.is_contiguous() and gate.dtype == x.dtype
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is None:
        return by_rows(torch.sigmoid, gate).mul(x)
    out = torch.empty_like(x)
    sizes = *x.shape, x.dtype == torch.bfloat16
    call(kernels.triforce_by_sigmoid, x.data_ptr(), gate.data_ptr(), gate.shape[1], out.data_ptr(), *sizes)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm over the last dimension of `x` `[n, heads, width]`, times `weight` `[width]`, times the SiLU of
    `gate` `[n, heads, width]`, in `x`'s dtype.

    The norm is rounded to `x`'s dtype, and again after the product with `weight`. The SiLU and the last product are
    float32. Rows are computed as in `gated`.
    """
    fits = len(x) <= STEP_ROWS and x.is_contiguous() and gate.stride()[1:] == (x.shape[2], 1) and weight.is_contiguous()
    fits = fits and x.dtype == gate.dtype == weight.dtype
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is None:

        def plain(both: Tensor) -> Tensor:
            normed = F.rms_norm(both[..., 0, :, :].float(), weight.shape, None, eps).to(x.dtype) * weight
            return (normed * F.silu(both[..., 1, :, :].float())).to(x.dtype)

        return by_rows(plain, torch.stack((x, gate), dim=1))
    out = torch.empty_like(x)
    call(
        kernels.triforce_gated_norm,
        *(x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), eps, out.data_ptr()),
        *(*x.shape, x.dtype == torch.bfloat16, threads()),
    )
    return out


def by_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`compute(x)` for `x` `[n, ...]`. If the bits of a row must not depend on other rows (see `gated`), `compute` is
    called for one row `[...]` at a time, and the results are stacked."""
    one_by_one = x.device.type == "cpu" and len(x) <= STEP_ROWS
    if one_by_one and products_are_independent(x.device, x.dtype):
        return torch.stack([compute(row) for row in x])
    return compute(x)


def gated_mlp(
    x: Tensor, norm: Tensor | None, eps: float, gate_up: Tensor, down: Tensor, *, onto: Tensor | None = None
) -> Tensor:
    """The MLP of Llama, with the RMS norm before it, if one is given: `down · (silu(gate · y) * (up · y))`.

    Args:
        x: `[n, hidden]`.
        norm: `[hidden]`, in `x`'s dtype.
        gate_up: `[2 * intermediate, hidden]`, contiguous.
        down: `[hidden, intermediate]`, contiguous.
        onto: `[n, hidden]`, which may be `x`: the result, in `x`'s dtype, is added to it.

    Returns:
        `[n, hidden]` in `x`'s dtype: `onto`, if that is given.

    Raises:
        MemoryError: no memory for the temporaries of a compiled kernel.
    """
    fits = down.is_contiguous() and down.dtype == x.dtype and _takes_sums(onto, x)
    kernels = _kernels_for(x, gate_up, norm) if fits else None
    if kernels is None:

        def plain(rows: Tensor) -> Tensor:
            # Nothing holds the normed rows any longer than it must.
            gate, up = F.linear(rows if norm is None else F.rms_norm(rows, norm.shape, norm, eps), gate_up).chunk(
                2, dim=-1
            )
            return F.linear(gated(gate, up, "silu"), down)

        result = _by_tiles(plain, x)
        return result if onto is None else onto.add_(result)
    hidden, width = down.shape
    given = gate_up.data_ptr(), down.data_ptr(), None
    return _normed(kernels.triforce_gated_mlp, x, norm, eps, given, onto, (hidden, width), hidden)


def _takes_sums(onto: Tensor | None, x: Tensor) -> bool:
    """Whether the compiled kernels can add their result for `x` to `onto`."""
    return onto is None or (onto.is_contiguous() and onto.dtype == x.dtype)


def _by_tiles(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`compute(x)`; if rows are padded, computed in tiles of exactly `TILE_ROWS` rows."""
    n = x.shape[0]
    if not selected().padded or n > STEP_ROWS:
        return compute(x)
    outs = [compute(F.pad(tile, (0, 0, 0, TILE_ROWS - tile.shape[0]))) for tile in x.split(TILE_ROWS)]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[:n]


def steps_are_compiled(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the compiled kernels compute products and attention of a step (at most `STEP_ROWS` rows)."""
    layers = _kernels(device, dtype, selected().layers) is not None
    return layers and compiled_attention(dtype, head_dim) and selected().attention in (None, "compiled")


def steps_make_numbers(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the product of a step with any matrix in few bits expands the numbers of the matrix as it goes
    (`held_linear`). Then no memory is taken for expanded numbers."""
    return dtype == torch.bfloat16 and _kernels(device, dtype, selected().layers) is not None


def products_are_independent(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the product of a row of a step with a matrix is the same, bit by bit, whatever other rows are in the
    step."""
    return _kernels(device, dtype, selected().layers) is not None or selected().padded


def rows_are_independent(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the result of a row of a step is the same, bit by bit, whatever other rows are in the step.

    True if the compiled kernels compute the step, or if rows are padded.
    """
    return steps_are_compiled(device, dtype, head_dim) or selected().padded


def _normed(
    kernel: Any,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    given: tuple[Any, ...],
    onto: Tensor | None,
    sizes: tuple[int, int],
    outputs: int,
) -> Tensor:
    """Calls `triforce_linear` or `triforce_gated_mlp`, which take the same arguments except `given`.

    For `triforce_linear`, `given` is the matrix, the bias, the matrices in few bits, and how many of these there are.
    For `triforce_gated_mlp`, it is the two matrices, and the matrices in few bits.
    """
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device) if onto is None else onto
    failed = call(
        kernel,
        x.data_ptr(),
        x.stride(0),
        _address(norm),
        eps,
        *given,
        out.data_ptr(),
        onto is not None,
        x.shape[0],
        *sizes,
        x.dtype == torch.bfloat16,
        cpu_level(),
        threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the temporaries of {x.shape[0]} rows")
    return out


def _address(given: Tensor | None) -> int | None:
    return None if given is None else given.data_ptr()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Applies rotary embedding in the half-split layout to the first `width` numbers of each head:
    `x * cos + roll(x, width / 2) * sin`, computed in float32. The other numbers stay unchanged.

    Args:
        x: `[heads, n, head_dim]`.
        cos, sin: `[n, width]`, or `[width]` for the same angles in every row; float32. `sin` includes the sign of
            `rotate_half`.
        out: `[heads, n, head_dim]`, written; it may be a slice of a cache.

    Returns:
        `out`, or a new tensor if that is not given.
    """
    heads, n, head_dim = x.shape
    if out is None:
        out = torch.empty((heads, n, head_dim), dtype=x.dtype, device=x.device)
    width = cos.shape[-1]
    if width < head_dim:
        out[..., width:] = x[..., width:]
        rotate(x[..., :width], cos, sin, out[..., :width])
        return out
    fits = n <= STEP_ROWS and x.stride(2) == out.stride(2) == 1 and out.dtype == x.dtype and cos.is_contiguous()
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits and cos.dtype == torch.float32 else None
    if kernels is None:
        return out.copy_(torch.addcmul(x * cos, x.roll(head_dim // 2, dims=-1), sin))
    _rotate(kernels, x, (cos, sin), out, None)
    return out


def copy_rows(x: Tensor, out: Tensor) -> None:
    """Writes `x` `[heads, n, head_dim]` to `out`, which has its shape and dtype, and may be a slice of a cache."""
    fits = x.shape[1] <= STEP_ROWS and x.stride(2) == out.stride(2) == 1 and x.dtype == out.dtype
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is None:
        out.copy_(x)
    else:
        _rotate(kernels, x, None, out, None)


def put(x: Tensor, buffer: Tensor, slots: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> None:
    """Writes the rows of `x` to the rows of `buffer` that the tensor `slots` gives.

    Args:
        x: `[heads, n, head_dim]`.
        buffer: `[heads, room, head_dim]`, written.
        slots: `[n]` int64, the row of `buffer` for each row of `x`.
        rotation: `cos` and `sin` as for `rotate`, which is then applied to `x` first.
    """
    if rotation is not None and rotation[0].shape[-1] < x.shape[2]:
        width = rotation[0].shape[-1]
        put(x[..., width:], buffer[..., width:], slots)
        x, buffer = x[..., :width], buffer[..., :width]
    fits = x.shape[1] <= STEP_ROWS and x.stride(2) == buffer.stride(2) == 1 and buffer.dtype == x.dtype
    fits = fits and slots.dtype == torch.int64 and slots.is_contiguous()
    if rotation is not None:
        fits = fits and rotation[0].is_contiguous() and rotation[0].dtype == torch.float32
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits else None
    if kernels is None:
        buffer.index_copy_(1, slots, rotate(x, *rotation) if rotation else x)
    else:
        _rotate(kernels, x, rotation, buffer, slots)


def _rotate(
    kernels: ctypes.CDLL, x: Tensor, rotation: tuple[Tensor, Tensor] | None, out: Tensor, slots: Tensor | None
) -> None:
    heads, n, head_dim = x.shape
    cos, sin = rotation or (None, None)
    (head_stride, row_stride, _), (out_head_stride, out_row_stride, _) = x.stride(), out.stride()
    call(
        kernels.triforce_rotate,
        x.data_ptr(),
        head_stride,
        row_stride,
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        0 if cos is None or cos.dim() == 1 else head_dim,
        out.data_ptr(),
        out_head_stride,
        out_row_stride,
        None if slots is None else slots.data_ptr(),
        heads,
        n,
        head_dim,
        x.dtype == torch.bfloat16,
    )


def _kernels_for(x: Tensor, weight: Tensor, *vectors: Tensor | None) -> ctypes.CDLL | None:
    """The compiled kernels, if they can multiply rows `x` by the matrix `weight` with these `vectors`."""
    if x.shape[0] > STEP_ROWS or x.stride(1) != 1 or x.shape[1] != weight.shape[1]:
        return None
    for given in (weight, *vectors):
        if given is not None and (given.dtype != x.dtype or not given.is_contiguous()):
            return None
    return _kernels(x.device, x.dtype, selected().layers)


def _kernels_for_held(x: Tensor, inputs: int, onto: Tensor | None, *vectors: Tensor | None) -> ctypes.CDLL | None:
    """The compiled kernels, if they can multiply `x` by a matrix in few bits."""
    fits = x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.shape[0] <= STEP_ROWS and x.shape[1] == inputs
    fits = fits and _takes_sums(onto, x)
    fits = fits and all(one is None or (one.dtype == x.dtype and one.is_contiguous()) for one in vectors)
    return _kernels(x.device, x.dtype, selected().layers) if fits else None


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, wanted: Literal["plain"] | None) -> ctypes.CDLL | None:
    """The compiled kernels, if there are kernels for this processor, device and dtype, and they are wanted."""
    if wanted == "plain" or device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    return loaded() if cpu_level() >= Level.AVX512_BF16 else None
