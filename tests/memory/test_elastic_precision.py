"""In bf16 both algorithms read equally well at every block: a table may use either."""

import pytest
import torch

from elastic_memory.memory.contract import Geometry
from elastic_memory.memory.elastic import ElasticMemory

BLOCKS, SIZE = 16, 64


@pytest.mark.parametrize("sampling", ["uniform", "exponential", "geometric_cells"])
@pytest.mark.parametrize("algorithm", ["direct", "recurrent"])
def test_readings_in_bf16_do_not_lose_precision_from_block_to_block(algorithm, sampling):
    geometry = Geometry(width=32, heads=2, kv_heads=2, head_dim=16, layers=12, block_size=SIZE)
    memory = ElasticMemory(geometry, order=48, points=16, sampling=sampling, algorithm=algorithm)
    torch.manual_seed(0)
    tokens = torch.randn(1, 2, BLOCKS * SIZE, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = memory.read_all(tokens, tokens, host=None)
    exact = memory.read_all(tokens.double(), tokens.double(), host=None)
    errors = [float((a[0].double() - b[0]).norm() / b[0].norm()) for a, b in zip(rounded, exact, strict=True)]
    assert len(errors) == BLOCKS - 1
    assert max(errors) < 0.004, errors
    assert errors[-1] < 1.5 * errors[0], errors
