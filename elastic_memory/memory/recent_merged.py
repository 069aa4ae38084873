"""A hybrid: the newest raw tokens, and merged tokens of the whole history."""

from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import Geometry, MemoryInfo
from elastic_memory.memory.merged import MergedMemory
from elastic_memory.memory.recent import QueueBeside
from elastic_memory.memory.tools import budget


class RecentMergedMemory(QueueBeside):
    """`share` of `order` is a queue at its true positions, the rest slots of `merged`; all join the block's softmax.

    Under sliding attention the queue is a window wider by as many tokens. `distance`, `rounds`, `slow`: as for merged.
    """

    info = MemoryInfo(
        source="ours: merged memory beside a queue, at equal floats",
        phrase="the newest tokens raw, the whole history merged by similar keys",
        paper_floats=lambda key, value, count, *queue: key + value + sum(queue),
    )

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        share: float = 0.5,
        distance: int = 0,
        rounds: int = 4,
        slow: float = 1.0,
        detach_every: int | None = None,
    ):
        order, raw = budget(order, share)
        merged = MergedMemory(
            geometry, order=order, distance=distance, rounds=rounds, slow=slow, detach_every=detach_every
        )
        super().__init__(merged, raw)
