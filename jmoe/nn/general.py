"""Linear layers over any axes: what takes the place of ``nnx.LinearGeneral`` and ``nnx.Einsum``."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jmoe.nn import mesh, param
from jmoe.nn.linear import Linear


class Contraction(Linear):
    """A ``Linear`` whose input features are several axes of x, and whose output features are several axes of y.

    The weight is (*batch, N, K), both flattened; batch axes have weights of their own.

    Args:
      in_features: K.
      out_features: N.
      batch_shape: extents of the batch axes.
      out_shape: the axes that N is made of.
      **options: as for ``Linear``; ``sharding`` names the batch axes too, first.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        out_shape: Sequence[int],
        batch_shape: Sequence[int] = (),
        sharding: Sequence[Any] = (None, None),
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.out_shape = tuple(out_shape)
        self.batch_shape = tuple(batch_shape)
        self.sharding = tuple(sharding)

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return param.stack_shape(self, "weight", 2 + len(self.batch_shape))

    def _spec(self, x: Array) -> PartitionSpec:
        return PartitionSpec()

    def _contract(self, x: Array, batch: Sequence[int], contracted: Sequence[int]) -> Array:
        """The layer over the axes ``contracted`` of x: (*batch axes, *other axes in order, *out_shape)."""
        free = [axis for axis in range(x.ndim) if axis not in (*batch, *contracted)]
        lead = [x.shape[axis] for axis in (*batch, *free)]
        x = jnp.transpose(x, (*batch, *free, *contracted)).reshape(*lead, self.in_features)
        return self._over_batch(x).reshape(*lead, *self.out_shape)

    def _over_batch(self, x: Array) -> Array:
        if not self.batch_shape:
            return super()._apply(x, None)
        count = len(self.batch_shape)
        rows = x.reshape(math.prod(self.batch_shape), -1, self.in_features)
        first = 0 if self.layer is None else 1  # where stacked layers lead

        def one_axis(leaf: Array, first: int) -> Array:
            return leaf.reshape(*leaf.shape[:first], -1, *leaf.shape[first + count :])

        weight = jax.tree.map(lambda leaf: one_axis(leaf, first), self.qweight)
        bias = None if self.bias is None else one_axis(self.bias.get_value(), first)
        scale = None if self.weight_input_scale is None else one_axis(self.weight_input_scale.get_value(), 0)
        axes = (0, first, None if bias is None else first, None if scale is None else 0)
        y = jax.vmap(self._product, in_axes=axes)(rows, weight, bias, scale)
        return y.reshape(*x.shape[:-1], self.out_features)


class LinearGeneral(Contraction):
    """``nnx.LinearGeneral`` with a plain or a quantized weight; the call is the same.

    Args:
      in_features, out_features, **options: as for ``Contraction``.
      axis: the axes of x that are contracted.
      batch_axis: the axes of x that have weights of their own.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Sequence[int] = (-1,),
        batch_axis: Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.axis = tuple(axis)
        self.batch_axis = tuple(batch_axis)

    def _apply(self, x: Array, tokens: mesh.Tokens) -> Array:
        # Flax takes both in ascending order, whatever the order that they are given in.
        batch, axis = (sorted(a % x.ndim for a in axes) for axes in (self.batch_axis, self.axis))
        return self._contract(x, batch, axis)


class Einsum(Contraction):
    """A two-operand ``nnx.Einsum`` with a plain or a quantized weight; the call is the same.

    Args:
      in_features, out_features, **options: as for ``Contraction``.
      equation: the einsum of x and the kernel.
    """

    def __init__(self, in_features: int, out_features: int, *, equation: str, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.equation = equation

    def _apply(self, x: Array, tokens: mesh.Tokens) -> Array:
        left, kernel, result = split_equation(self.equation)
        batch, contracted, out = kernel_axes(self.equation)
        spread = x.ndim - len(left.replace("...", ""))
        if spread < 0 or (spread and "..." not in left):
            raise ValueError(f"x has shape {tuple(x.shape)}, but the einsum {self.equation!r} takes {left!r} for it")
        # The ellipsis as characters that are no letters, one an axis.
        ellipsis = "".join(map(chr, range(spread)))
        left, result = left.replace("...", ellipsis), result.replace("...", ellipsis)
        y = self._contract(x, [left.index(c) for c in batch], [left.index(c) for c in contracted])
        free = [c for c in left if c not in kernel]
        order = [*batch, *free, *out]
        return jnp.transpose(y, [order.index(c) for c in result])


def split_equation(equation: str) -> tuple[str, str, str]:
    """``"nta,hab->nthb"`` as ("nta", "hab", "nthb")."""
    operands, _, result = equation.replace(" ", "").partition("->")
    left, _, kernel = operands.partition(",")
    return left, kernel, result


def kernel_axes(equation: str) -> tuple[str, str, str]:
    """The kernel's letters by what they do: batch axes, contracted ones, and output features in the result's order.

    Raises:
      ValueError: an equation that is no product of x with a matrix.
    """
    left, kernel, result = split_equation(equation)
    reason = None
    if "..." in kernel:
        reason = "its kernel has an ellipsis"
    elif any(len(set(part)) != len(part) for part in (left.replace("...", ""), kernel, result.replace("...", ""))):
        reason = "an axis occurs twice in one operand"
    elif ("..." in left) != ("..." in result):
        reason = "an ellipsis is summed over"
    elif alone := [c for c in left.replace("...", "") if c not in kernel and c not in result]:
        reason = f"axis {alone[0]!r} of the input is summed alone"
    elif alone := [c for c in kernel if c not in left and c not in result]:
        reason = f"axis {alone[0]!r} of the kernel is summed alone"
    if reason is not None:
        raise ValueError(f"the einsum {equation!r} is no product with a matrix: {reason}")
    batch = "".join(c for c in kernel if c in left and c in result)
    contracted = "".join(c for c in kernel if c in left and c not in result)
    return batch, contracted, "".join(c for c in result if c in kernel and c not in left)
