"""Triton kernels, each tested against a PyTorch reference."""

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


def agrees(what: str, error: Callable[[], float], within: float) -> bool:
    """Whether kernels may be used: their relative error against plain code, measured on this machine.

    For kernels that training relies on and that newer packages, drivers or chips could silently break. Measured in a
    separate thread, where autocast, recomputation and other modes around the first use are not active.
    """
    try:
        with ThreadPoolExecutor(1) as elsewhere:
            found = elsewhere.submit(error).result()
    except torch.OutOfMemoryError:
        raise
    except Exception as exception:  # whatever a compiler or a driver says: plain code runs instead
        warnings.warn(f"{what} do not run here: PyTorch code is used instead ({exception})", stacklevel=2)
        return False
    if not found <= within:
        warnings.warn(f"{what} have a relative error of {found:.1e} here: PyTorch code is used instead", stacklevel=2)
    return found <= within


def largest(errors: Iterable[torch.Tensor | float]) -> float:
    """The largest error; NaN if one of them is NaN."""
    return torch.stack([torch.as_tensor(error, dtype=torch.float64, device="cpu") for error in errors]).max().item()
