"""Shapes as types: `Float[Tensor, "batch head token dim"]`.

jaxtyping is a development dependency. Without it the annotations are plain tensors, so that importing
the package needs torch, transformers, numpy and safetensors and nothing else.
"""

from torch import Tensor

try:
    from jaxtyping import Bool, Float, Int
except ImportError:  # pragma: no cover

    class _Unshaped:
        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            return item[0]

    Bool = Float = Int = _Unshaped  # type: ignore[assignment, misc]

__all__ = ["Bool", "Float", "Int", "Tensor"]
