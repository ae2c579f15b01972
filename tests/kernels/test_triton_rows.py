"""Triton's kernel that reads rows in host memory: they are the matrix's, of all number formats; captured, on a GPU."""

import pytest
import torch
from triforce.kernels.host_rows import reads_host_memory, rows_from_host
from triforce.kernels.selection import use_kernels
from triton_runs import both, launches

from triforce.kernels.triton.rows import TILE_WIDTH  # isort: skip (Triton may be missing until here)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8]


def in_host_memory(matrix, device):
    """A copy as a GPU reads it."""
    if device == "cpu":
        return matrix
    from triforce.offload.transfer.cuda_link import CudaLink

    return CudaLink(torch.device(device)).host_memory((1, *matrix.shape), matrix.dtype)[0].copy_(matrix)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("width", [1, 34, TILE_WIDTH, TILE_WIDTH + 7])
def test_rows_are_those_of_the_matrix(device, dtype, width):
    g = torch.Generator().manual_seed(width)
    matrix = torch.randint(0, 255, (29, width * dtype.itemsize), dtype=torch.uint8, generator=g)
    matrix = matrix.view(dtype) if dtype in (torch.uint8, torch.int8) else torch.randn(29, width, generator=g).to(dtype)
    ids = torch.tensor([28, 0, 3, 3, 28])
    found = rows_from_host(in_host_memory(matrix, device), ids.to(device))
    assert found.dtype == dtype and found.is_contiguous() and torch.equal(found.cpu(), matrix[ids])
    assert rows_from_host(in_host_memory(matrix, device), ids[:0].to(device)).shape == (0, matrix.shape[1])


@pytest.mark.gpu
def test_a_captured_pass_reads_the_rows_of_its_ids():
    matrix = torch.randn(97, 2048)
    held, ids = in_host_memory(matrix, "cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    rows_from_host(held, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rows_from_host(held, ids)
    for wanted in ([1, 2, 3], [96, 0, 96]):
        ids.copy_(torch.tensor(wanted))
        graph.replay()
        assert torch.equal(found.cpu(), matrix[wanted])


def test_no_launch_has_more_programs_in_a_dimension_than_cuda_takes():
    """65,535 in all but the first: of a prompt's part, of rows of the widest models."""
    with launches(run=False) as grids:
        rows_from_host(torch.zeros(2, 2**14, dtype=torch.uint8), torch.zeros(135_168, dtype=torch.int64))
    ((size, *rest),) = grids
    assert size == 135_168 and all(one < 2**16 for one in rest)


def test_only_devices_with_triton_read_host_memory():
    assert not reads_host_memory(torch.device("cpu"))
    for packages in ((), ("triton",)):
        with use_kernels(as_gpu=packages):
            assert reads_host_memory(torch.device("cpu")) == bool(packages)
