"""Two processes of accelerate, each with a row of the batch, make the step that one process makes."""

import os
import socket

import pytest
import torch

from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

ROWS = torch.randint(1, 61, (2, 45), generator=torch.Generator().manual_seed(1))
RATE = 0.1


def in_one_process(memory):
    model = small_model(memory).train()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for _ in range(2):
        loss = model(ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def in_two(rank, kind, port):
    """Runs in each process; what fails here fails the test."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    from tests.training.fsdp_on_cpu import with_fsdp

    plugin = None
    if kind == "fsdp2":
        AcceleratorState.__init__ = with_fsdp
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "MemoryLayer"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.num_processes == 2
    for memory in MEMORIES:
        expected, weights = in_one_process(memory)
        plain = small_model(memory).train()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), RATE))
        if kind == "fsdp2":
            assert all(isinstance(weight, torch.distributed.tensor.DTensor) for weight in model.parameters())
        row = ROWS[rank : rank + 1]
        for wanted in expected:
            loss = model(row, labels=row).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(wanted, abs=1e-4), memory
        gathered = accelerator.get_state_dict(model)  # by all, whole in the first
        for name, weight in gathered.items() if rank == 0 else ():
            torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=1e-3)
        accelerator.free_memory()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_make_the_step_of_one(kind):
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_two, args=(kind, port), nprocs=2)
