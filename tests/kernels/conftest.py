"""What the tests of Triton's kernels need of its interpreter."""

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def exact_products():
    """Matrix products of the interpreter in float64. Its own multiply the bits of bfloat16 numbers in place of the
    numbers, and those of a BLAS round a row by its place among others, which tensor cores do not."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(x):
        if str(x.dtype.scalar) == "bf16":
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return TensorHandle((numbers(a) @ numbers(b)).astype(d.data.dtype) + d.data, d.dtype.scalar)

    before = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = create_dot
    yield
    InterpreterBuilder.create_dot = before
