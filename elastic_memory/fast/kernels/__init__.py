"""Kernels written by hand, and those of others: faster roads to numbers that plain torch code gives too."""

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


def agrees(what: str, error: Callable[[], float], within: float) -> bool:
    """Whether kernels may be used: their relative error, measured here, against plain code.

    For what training relies on and newer packages, drivers or chips could silently break. Measured in a thread of its
    own, which knows nothing of autocast, recomputation or other modes around the first use.
    """
    try:
        with ThreadPoolExecutor(1) as elsewhere:
            found = elsewhere.submit(error).result()
    except torch.OutOfMemoryError:
        raise
    except Exception as exception:  # whatever a compiler or a driver says: plain code goes on
        warnings.warn(f"{what} do not run here, plain code does instead: {exception}", stacklevel=2)
        return False
    if not found <= within:
        warnings.warn(f"{what} are off by {found:.1e} here, plain code runs instead", stacklevel=2)
    return found <= within


def largest(errors: Iterable[torch.Tensor | float]) -> float:
    """The worst of them, and not a number if one is not."""
    return torch.stack([torch.as_tensor(error, dtype=torch.float64, device="cpu") for error in errors]).max().item()
