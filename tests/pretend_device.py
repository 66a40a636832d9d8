"""A device that only pretends: its tensors are of a type of their own, their numbers on the CPU.

torch is told of a device named "pretend", whose operations are done here. So what an engine asks of
a device is seen one operation at a time: copies there and back, waits, new tensors. Copies and
waits are told by what goes in and comes out, not by the names of functions, so that none is missed
for being spelled otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tightkv.engine.accelerator import MemoryReading
from tightkv.formats.layout import BlockLayout
from tightkv.kernels import AttentionBatch, AttentionParams, CpuBackend, LayerCache

__all__ = ["PRETEND", "Counts", "PretendAccelerator", "PretendBackend", "on_pretend_device"]

_setup_privateuseone_for_python_backend("pretend")
PRETEND = torch.device("pretend", 0)

# What a GPU answers only after it has counted something.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "bincount", "where.default", "argwhere")


class Counts(Counter[str]):
    """How often: "to device", "to host", "wait", "new" (tensors), and "new bytes"."""

    def since(self, before: Counts) -> dict[str, int]:
        """What has come since a copy of this was made, zeros left out."""
        return {name: count - before[name] for name, count in self.items() if count > before[name]}


class PretendTensor(torch.Tensor):
    """Says it lies on the device, and holds a tensor of the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: Any, raw: torch.Tensor) -> PretendTensor:
        tensor: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=PRETEND
        )
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """`torch.tensor` asks no Python type for its copy to a device: it is made to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == PRETEND:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(PRETEND)
        return func(*args, **kwargs)


_counts = Counts()


@contextmanager
def on_pretend_device() -> Iterator[Counts]:
    """Lets the device be; gives its counts."""
    with _Mode(), _FromNumbers():
        yield _counts


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if "shallow_copy" in name:  # whether a parameter may keep its object when it moves
        return False
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in given if isinstance(x, PretendTensor)]
    places = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    goes_there = places[0].type == PRETEND.type if places else bool(there)
    if name.startswith("copy_"):
        goes_there = isinstance(args[0], PretendTensor)
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    # A view of a weight, which is no tensor of inference mode, must not become one.
    with torch.inference_mode(False), torch.no_grad():
        result = func(*raw_args, **raw_kwargs)
    made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    _count_copies(name, args, kwargs, len(there), given, goes_there, bool(made))
    if not goes_there:
        return result
    _count_new(there, made)
    same = {id(x.raw): x for x in there}
    with torch.inference_mode(False):
        return tree_map(lambda x: same[id(x)] if id(x) in same else _wrapped(x), result)


def _raw(x: Any) -> Any:
    if isinstance(x, PretendTensor):
        return x.raw
    return torch.device("cpu") if x == PRETEND else x


def _wrapped(x: Any) -> Any:
    return PretendTensor(x) if isinstance(x, torch.Tensor) else x


def _count_copies(
    name: str,
    args: Any,
    kwargs: dict[str, Any],
    num_there: int,
    given: list[torch.Tensor],
    goes_there: bool,
    makes_tensors: bool,
) -> None:
    here = [x for x in given if not isinstance(x, PretendTensor)]
    copies = name.startswith(("copy_", "to.", "_to_copy", "index"))
    waits = False
    if goes_there and any(x.dim() > 0 or copies for x in here):
        _counts["to device"] += 1
        waits = not (kwargs.get("non_blocking") or (name.startswith("copy_") and True in args[2:]))
    if num_there and not goes_there and makes_tensors:
        _counts["to host"] += 1
    # A number for the host, or a result whose size depends on values.
    waits |= num_there > 0 and not makes_tensors
    is_mask = name.startswith("index") and any(
        isinstance(x, PretendTensor) and x.dtype in (torch.bool, torch.uint8)
        for x in tree_leaves(args[1])
    )
    waits |= num_there > 0 and (name.startswith(_SIZED_BY_VALUES) or is_mask)
    _counts["wait"] += waits


def _count_new(there: list[PretendTensor], made: list[torch.Tensor]) -> None:
    known = {x.raw.untyped_storage().data_ptr() for x in there}
    for tensor in made:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            _counts["new"] += 1
            _counts["new bytes"] += storage.nbytes()


class PretendAccelerator:
    """What it captures is run again at each replay, and its new tensors are not counted."""

    def __init__(self, total: int = 2**30) -> None:
        self.device = PRETEND
        self.num_captured = 0
        self.num_replayed = 0
        self._total = total
        self._bytes_before = 0

    def pin(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def memory(self) -> MemoryReading:
        peak = _counts["new bytes"] - self._bytes_before
        return MemoryReading(self._total, self._total - 2**20, held=2**20, used=0, peak=peak)

    def forget_peak(self) -> None:
        self._bytes_before = _counts["new bytes"]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        before = Counts(_counts)
        run()
        refused = _counts.since(before).keys() & {"to device", "to host", "wait"}
        if refused:
            raise RuntimeError(f"operation not permitted when stream is capturing: {refused}")
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            before = Counts(_counts)
            run()
            _counts["new"], _counts["new bytes"] = before["new"], before["new bytes"]

        return replay


class PretendBackend:
    """The kernels of the CPU, which see rows of padding as those of a GPU do."""

    name = "pretended"
    reason = "asked for"

    def __init__(self) -> None:
        self._backend = CpuBackend.choose()

    def check_layout(self, layout: BlockLayout) -> None:
        """Every layout is served."""

    def reshape_and_cache(
        self,
        cache: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        clip_counts: torch.Tensor,
        bad_tokens: torch.Tensor,
    ) -> None:
        slots, bad = _raw(slot_mapping), _raw(bad_tokens)
        written = slots >= 0
        marks = bad[written]
        rows = _raw(key)[written], _raw(value)[written], slots[written]
        self._backend.reshape_and_cache(_on_host(cache), *rows, _raw(clip_counts), marks)
        bad[written] = marks

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        starts, seq_lens, table = map(
            _raw, (batch.query_start_loc, batch.seq_lens, batch.block_table)
        )
        count = int((seq_lens > 0).sum())  # padding comes last
        num_tokens = int(starts[count])
        real = AttentionBatch(starts[: count + 1], seq_lens[:count], table[:count])
        out = torch.zeros(len(query), query.shape[1], cache.layout.value_size)
        out[:num_tokens] = self._backend.paged_attention(
            _raw(query)[:num_tokens], _on_host(cache), real, params
        )
        return PretendTensor(out)


def _on_host(cache: LayerCache) -> LayerCache:
    if "host" not in cache.bound:
        scales = _raw(cache.k_scale), _raw(cache.v_scale)
        cache.bound["host"] = LayerCache(_raw(cache.blocks), cache.layout, *scales)
    bound: LayerCache = cache.bound["host"]
    return bound
