"""Linear layers on a CPU: weights packed once by oneDNN, sibling projections joined.

Two reasons. A row's result is bit-identical alone and in any batch, which `F.linear` does not give
and the engine promises. And with 4 to 64 rows it is two to three times faster.

Weights of 16 bits are multiplied as such where the processor does that fast and with the same bits
in any batch, else as float32 with the result rounded: see `product_dtype`.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tightkv.errors import ConfigError

__all__ = [
    "JoinedPart",
    "JoinedProduct",
    "PackedLinear",
    "pack_linear_layers",
    "product_dtype",
    "weight_bytes",
]

_logger = logging.getLogger("tightkv")

# From 16 rows on, oneDNN picks a layout whose sums do not depend on the number of rows;
# packed for 1 row it would pick one whose sums do.
_ROWS_HINT = 16

_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_JOINED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# A read of dtype, device or shape is answered by PackedWeight; any other needs the plain weight.
_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")


@dataclass(frozen=True)
class PackedWeight:
    """Stands where model code reads `layer.weight`: true facts, and no numbers.

    It is no tensor on purpose, so that arithmetic on it fails at once (arithmetic of a CPU tensor
    with a meta tensor would pass, and be wrong).
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device = _CPU


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed by oneDNN; on a CPU only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        # A plain attribute: `.to()` and `state_dict()` cannot handle a tensor in oneDNN's layout.
        self.packed = _pack(weight)
        self.bias = (
            None
            if bias is None
            else nn.Parameter(bias.detach().to(self.packed.dtype), requires_grad=False)
        )

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(torch.Size((self.out_features, self.in_features)), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.packed, self.bias)

    def add_to(self, other: Tensor, x: Tensor) -> Tensor:
        """`other` plus the product, in one pass; float32."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.packed, self.bias, "add"
        )
        return result

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class JoinedProduct:
    """One packed product for several linear layers that read the same input.

    Its parts are called one after another with the same tensor object. The first call computes all
    of them; the others take their columns. The result waits only until every part has been taken,
    the input is gone, or another input comes. The input is known by a weak reference, so neither a
    reused id nor a forgotten part can give a wrong or lasting result. (Only a model that changed
    the tensor in place between two of these calls would be served wrongly; none does.)
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.packed = _pack(torch.cat([weight.detach() for weight in weights]))
        self.bias = _join_biases(weights, biases, self.packed.dtype)
        self.dtype = weights[0].dtype
        self._sizes = [weight.shape[0] for weight in weights]
        self._input: weakref.ref[Tensor] | None = None
        self._waiting: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """All parts side by side, `[..., in_features]` to `[..., sum of out_features]`."""
        return _multiply(x, self.packed, self.bias)

    def take(self, part: int, x: Tensor) -> Tensor:
        """The columns of one part, `[..., in_features]` to `[..., out_features]`."""
        if self._input is None or self._input() is not x or part not in self._waiting:
            self._compute(x)
        piece = self._waiting.pop(part)
        if not self._waiting:
            self._input = None
        return piece

    def _compute(self, x: Tensor) -> None:
        pieces = torch.split_with_sizes(self(x), self._sizes, dim=-1)
        self._waiting = dict(enumerate(pieces))
        self._input = weakref.ref(x, self._forget)

    def _forget(self, _: weakref.ref[Tensor]) -> None:
        self._waiting.clear()


class JoinedPart(nn.Module):
    """One of the linear layers of a `JoinedProduct`, called as the layer it replaces."""

    def __init__(self, product: JoinedProduct, part: int, layer: nn.Linear) -> None:
        super().__init__()
        self.product = product
        self.part = part
        self.in_features = layer.in_features
        self.out_features = layer.out_features

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(torch.Size((self.out_features, self.in_features)), self.product.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.product.take(self.part, x)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, part={self.part}"


def pack_linear_layers(model: nn.Module) -> None:
    """Replace every linear layer of `model` by its packed form, in place.

    Layer by layer, so that the plain weights of at most one module exist a second time. A weight
    that is also an embedding stays for the lookup. Layers whose weight the model's own code reads
    stay as they are, and so do experts and routers that are bare parameters.

    Raises:
        ConfigError: if this build of torch lacks oneDNN.
    """
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available():
        raise ConfigError(
            f"This build of torch ({torch.__version__}) has no oneDNN, which a CPU needs for "
            "batch-invariant results: install a build with it, or use another device."
        )
    # The list must not hold the layers themselves, or their weights could not be released.
    parents = [m for m in model.modules() if not isinstance(m, (nn.Linear, Conv1D))]
    plain = {kind: _read_weights(kind) for kind in {type(parent) for parent in parents}}
    for parent in parents:
        for names in _JOINED_NAMES:
            _join_children(parent, names, plain[type(parent)])
        _pack_children(parent, plain[type(parent)])


@lru_cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which products with weights of `dtype` are computed on this machine.

    Its own where oneDNN has that, keeps a row's bits in any batch, and is faster than float32 in a
    short timing; else float32.
    """
    if dtype == torch.float32:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if not _is_invariant(dtype):
        _logger.info(
            "linear layers in %s are multiplied in float32: on this processor oneDNN has no product"
            " of that type whose rows do not depend on their batch",
            name,
        )
        return torch.float32
    own, wide = _seconds_of_product(dtype), _seconds_of_product(torch.float32)
    chosen = dtype if own < wide else torch.float32
    _logger.info(
        "linear layers in %s are multiplied in %s: %.2f ms against %.2f ms in float32, 16 rows",
        name,
        str(chosen).removeprefix("torch."),
        own * 1e3,
        wide * 1e3,
    )
    return chosen


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, buffers and packed weights; what is shared counts once."""
    plain = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    packed: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            packed[id(module)] = _packed_bytes(module.packed)
        elif isinstance(module, JoinedPart):
            bias = 0 if module.product.bias is None else module.product.bias.nbytes
            packed[id(module.product)] = _packed_bytes(module.product.packed) + bias
    return sum(plain.values()) + sum(packed.values())


def _join_children(parent: nn.Module, names: Sequence[str], plain: frozenset[str]) -> None:
    layers = {
        name: child
        for name, child in parent.named_children()
        if name in names and name not in plain and _is_packable_linear(child)
    }
    inputs = {(layer.in_features, layer.weight.dtype) for layer in layers.values()}
    if len(layers) < 2 or len(inputs) > 1:
        return
    product = JoinedProduct(
        [layer.weight for layer in layers.values()], [layer.bias for layer in layers.values()]
    )
    for part, (name, layer) in enumerate(layers.items()):
        setattr(parent, name, JoinedPart(product, part, layer))


def _pack_children(parent: nn.Module, plain: frozenset[str]) -> None:
    for name in [name for name, _ in parent.named_children() if name not in plain]:
        child = parent.get_submodule(name)
        if _is_packable_linear(child):
            setattr(parent, name, PackedLinear(child.weight, child.bias))
        elif type(child) is Conv1D and child.weight.dtype in _DTYPES:
            # GPT-2 stores [in, out]; its own F.addmm is not batch-invariant.
            setattr(parent, name, PackedLinear(child.weight.T, child.bias))


def _is_packable_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass (quantized, LoRA, ...) multiplies in its own way.
    return type(module) is nn.Linear and module.weight.dtype in _DTYPES


def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the layers whose weight the code of a module class uses as a tensor."""
    if kind.__module__.startswith("torch."):
        return frozenset()
    try:
        return frozenset(_WEIGHT_READ.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()  # no source to read; PackedWeight still makes such a use fail loudly


def _join_biases(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], dtype: torch.dtype
) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(weight.shape[0], dtype=dtype) if bias is None else bias.detach().to(dtype)
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


def _pack(weight: Tensor) -> Tensor:
    return _pack_as(product_dtype(weight.dtype), weight)


def _pack_as(dtype: torch.dtype, weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.detach().to(dtype).contiguous(), _ROWS_HINT
    )
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype != packed.dtype:
        return _multiply(x.to(packed.dtype), packed, bias).to(x.dtype)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _is_invariant(dtype: torch.dtype) -> bool:
    """Whether a packed product of this type exists and gives a row the same bits in any batch."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 576, generator=generator).to(dtype) for n in (960, 300))
    try:
        packed = _pack_as(dtype, weight)
        whole = _multiply(x, packed, None)
        return all(
            torch.equal(_multiply(x[:rows], packed, None), whole[:rows])
            for rows in (1, 2, 3, 7, 16, 17, 40, 64, 129)
        )
    except RuntimeError:  # how torch says that the processor lacks it
        return False


def _seconds_of_product(dtype: torch.dtype) -> float:
    """Of 16 rows with a weight of 1024 x 1024; the best of some."""
    packed = _pack_as(dtype, torch.zeros(1024, 1024))
    x = torch.zeros(16, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        _multiply(x, packed, None)
        best = min(best, time.perf_counter() - start)
    return best


def _packed_bytes(packed: Tensor) -> int:
    return int(torch.ops.mkldnn._nbytes(packed))
