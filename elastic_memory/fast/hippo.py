"""The recurrences of `hippo` in one kernel launch each."""

from typing import Any

import torch

from elastic_memory.fast.kernels import triton_runs_on


def kernels_on(device: torch.device) -> Any:
    """The kernels for tensors on this device, or None: step by step, a recurrence would leave a GPU idle."""
    if not triton_runs_on(device):
        return None
    from elastic_memory.fast.kernels import sweeps

    return sweeps
