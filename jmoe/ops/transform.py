"""Derivatives and batches of an operation: one JAX primitive, so that both keep the operation's bound on memory.

JAX's own batching of a loop over experts would dequantise as many experts at a time as the batch has examples, and run
the blocks that no row needs. The primitive folds a batch of tokens into the tokens instead, and so do its derivatives:
the primitive again, with another body. Where a batch cannot be folded, examples run one after another, or through JAX's
batching if that takes no more memory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


class Leaf(NamedTuple):
    """An array that a body takes or gives.

    Attributes:
      name: the argument that it belongs to.
      rows: its axis of tokens, or None.
      differentiable: whether derivatives with respect to it are anything but zero.
    """

    name: str
    rows: int | None
    differentiable: bool


class Body(Protocol):
    """A static function of arrays: an operation, or a derivative of a body."""

    @property
    def inputs(self) -> tuple[Leaf, ...]: ...
    @property
    def outputs(self) -> tuple[Leaf, ...]: ...
    @property
    def operation(self) -> "Operation":
        """What all of it is about."""
        ...

    def on(self, operation: "Operation") -> "Body":
        """The same of another operation."""
        ...

    def __call__(self, *leaves: Array) -> Sequence[Array]: ...


class Operation(Body, Protocol):
    """An operation itself."""

    @property
    def tokens(self) -> int: ...
    @property
    def independent_rows(self) -> bool:
        """Whether a row's result depends on no other row."""
        ...

    def folded(self, size: int) -> "Operation":
        """The operation on ``size`` times as many tokens."""
        ...

    def record_instead_of(self, other: "Operation") -> None:
        """Tells ``explain`` that it runs in the place of ``other``."""
        ...

    def suits_jax(self, names: set[str]) -> bool:
        """Whether JAX's own batching works and takes no more memory where these arguments have a batch."""
        ...

    def weight_only(self) -> tuple["Operation", list[int]]:
        """The operation that is differentiated, and which of this one's inputs it takes, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of ``of`` with respect to the inputs that ``wrt`` lists, at inputs of ``of`` that come first.

    It takes directions of ``wrt`` to those of the outputs; transposed, cotangents of the outputs to those of ``wrt``.
    All that it needs is computed again from the inputs, so nothing is kept for it.
    """

    of: Body
    wrt: tuple[int, ...]
    transposed: bool = False

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        return (*self.of.inputs, *(self.of.outputs if self.transposed else self._varied))

    @property
    def outputs(self) -> tuple[Leaf, ...]:
        return self._varied if self.transposed else self.of.outputs

    @property
    def operation(self) -> Operation:
        return self.of.operation

    @property
    def _varied(self) -> tuple[Leaf, ...]:
        return tuple(self.of.inputs[i] for i in self.wrt)

    @property
    def residuals(self) -> int:
        """How many inputs come before those that it is linear in."""
        return len(self.of.inputs)

    def on(self, operation: Operation) -> Body:
        return dataclasses.replace(self, of=self.of.on(operation))

    def transpose(self) -> "_Derivative":
        return dataclasses.replace(self, transposed=not self.transposed)

    def __call__(self, *leaves: Array) -> Sequence[Array]:
        at, linear = leaves[: self.residuals], leaves[self.residuals :]

        def function(*varied: Array) -> tuple[Array, ...]:
            changed = dict(zip(self.wrt, varied, strict=True))
            return tuple(self.of(*(changed.get(i, leaf) for i, leaf in enumerate(at))))

        varied = tuple(at[i] for i in self.wrt)
        if self.transposed:
            # Rematerialised, or XLA would find that the forward pass computes the same, and keep that.
            return jax.vjp(jax.checkpoint(function), *varied)[1](linear)
        return jax.jvp(function, varied, linear)[1]


_body_p = Primitive("jmoe")
_body_p.multiple_results = True


def execute(body: Body, leaves: Sequence[Array]) -> list[Array]:
    """``body(*leaves)``, differentiated and batched as this file says."""
    return _body_p.bind(*leaves, body=body, jaxpr=jax.make_jaxpr(lambda *leaves: list(body(*leaves)))(*leaves))


def _evaluate(*leaves: Array, body: Body, jaxpr: Any) -> list[Array]:
    del body
    return jaxpr_as_fun(jaxpr)(*leaves)


_body_p.def_impl(_evaluate)
_body_p.def_abstract_eval(lambda *_, body, jaxpr: jaxpr.out_avals)
mlir.register_lowering(_body_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, body: Body, jaxpr: Any) -> tuple[list[Any], list[Any]]:
    out = _body_p.bind(*primals, body=body, jaxpr=jaxpr)
    # What nobody differentiates with respect to must not cost products with zeros.
    wrt = [i for i, leaf in enumerate(body.inputs) if leaf.differentiable and type(tangents[i]) is not ad.Zero]
    if not wrt:
        return out, [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]
    directions = [tangents[i] for i in wrt]
    if body is body.operation:
        body, taken = body.operation.weight_only()
        primals, wrt = [primals[i] for i in taken], [taken.index(i) for i in wrt]
    return out, execute(_Derivative(body, tuple(wrt)), [*primals, *directions])


ad.primitive_jvps[_body_p] = _jvp


def _transpose(cotangents: Sequence[Any], *leaves: Any, body: Body, jaxpr: Any) -> list[Any]:
    assert isinstance(body, _Derivative)
    at, linear = leaves[: body.residuals], leaves[body.residuals :]
    out = execute(body.transpose(), [*at, *map(ad.instantiate_zeros, cotangents)])
    wanted = [y if ad.is_undefined_primal(leaf) else None for y, leaf in zip(out, linear, strict=True)]
    return [*(None for _ in at), *wanted]


ad.primitive_transposes[_body_p] = _transpose


def _batch(
    leaves: Sequence[Array], axes: Sequence[int | None], *, body: Body, jaxpr: Any
) -> tuple[list[Array], list[int]]:
    batched = [axis is not None for axis in axes]
    leaves = [leaf if axis is None else jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)]
    size = next(leaf.shape[0] for leaf, has in zip(leaves, batched, strict=True) if has)
    directions_only = isinstance(body, _Derivative) and not any(batched[: body.residuals])
    if not directions_only and _is_foldable(body, batched):
        return _fold(body, leaves, batched, size)
    names = {leaf.name for leaf in _batched(body.inputs, batched)}
    if directions_only or body.operation.suits_jax(names):
        whole = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=[0 if has else None for has in batched], axis_size=size)
        out = whole(*leaves)
        return out, [0] * len(out)

    def example(own: list[Array]) -> list[Array]:
        parts = iter(own)
        return execute(body, [next(parts) if has else leaf for leaf, has in zip(leaves, batched, strict=True)])

    out = lax.map(example, _batched(leaves, batched))
    return out, [0] * len(out)


batching.primitive_batchers[_body_p] = _batch


def _is_foldable(body: Body, batched: Sequence[bool]) -> bool:
    """Whether the examples' tokens may as well be tokens of one call."""
    fits = all(leaf.rows is not None or leaf.name == "counts" for leaf in _batched(body.inputs, batched))
    return fits and all(leaf.rows is not None for leaf in body.outputs) and body.operation.independent_rows


def _batched(items: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    return [item for item, has in zip(items, batched, strict=True) if has]


def _fold(body: Body, leaves: Sequence[Array], batched: Sequence[bool], size: int) -> tuple[list[Array], list[int]]:
    """One call for all examples.

    Their tokens come one example after another; or, where ``counts`` say how many of an expert's tokens are valid,
    every example's first token, then every one's second, so that the valid ones still come first.
    """
    tokens = body.operation.tokens
    by_token = any(leaf.name == "counts" for leaf in body.inputs)
    folded, valid = list(leaves), None
    for i, (leaf, has) in enumerate(zip(body.inputs, batched, strict=True)):
        if leaf.name == "counts":
            counts = leaves[i]
            if has:  # examples with fewer tokens than others have zeros there
                valid = jnp.arange(tokens, dtype=counts.dtype)[None, :, None] < counts.T[:, None, :]
                counts = jnp.max(counts, axis=0, initial=0)
            folded[i] = counts * size

    def masked(value: Array) -> Array:
        return value if valid is None else jnp.where(valid[..., None], value, jnp.zeros((), value.dtype))

    for i, (leaf, has) in enumerate(zip(body.inputs, batched, strict=True)):
        if leaf.rows is None:
            continue
        value = leaves[i] if has else jnp.broadcast_to(leaves[i], (size, *leaves[i].shape))
        # A scale that an example's tokens share is each token's.
        shape = value.shape
        axis = leaf.rows + 1
        value = jnp.broadcast_to(value, (*shape[:axis], tokens, *shape[axis + 1 :]))
        value = masked(jnp.moveaxis(value, 0, leaf.rows + by_token))
        folded[i] = value.reshape(*shape[1:axis], tokens * size, *shape[axis + 1 :])
    operation = body.operation.folded(size)
    if body is body.operation:
        operation.record_instead_of(body.operation)
    out = execute(body.on(operation), folded)
    axes = [leaf.rows + by_token for leaf in body.outputs if leaf.rows is not None]
    unfolded = []
    for y, leaf in zip(out, body.outputs, strict=True):
        assert leaf.rows is not None
        pair = (tokens, size) if by_token else (size, tokens)
        unfolded.append(masked(y.reshape(*y.shape[: leaf.rows], *pair, *y.shape[leaf.rows + 1 :])))
    return unfolded, axes
