"""``Linear``: a dense layer whose weight is plain or quantized."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jmoe import ops, parallel
from jmoe.arguments import COMPUTE_DTYPES, as_array, float_dtype
from jmoe.backends.activation import Activation
from jmoe.nn import mesh, options, param
from jmoe.nn.param import AxisName
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Recipe, as_recipe
from jmoe.sharding import spec_of, with_last


class Linear(nnx.Module):
    r"""A linear transformation over the last axis, with a plain or a quantized weight.

    .. math::
      y = \mathrm{activation}(x W^T + b)

    Created without ``rngs`` the weight is zero throughout, and so is every result without a bias, until the weight is
    set: from a checkpoint, say. ``from_dense`` and ``from_quantized`` take weights that are there.

    A quantized :math:`W` enters at the values that its codes and scales stand for, and x is quantised on the fly where
    the recipe says so. Product, scales, bias and activation are float32; the result is cast once.

    Example usage::

      >>> import jax, jmoe
      >>> from flax import nnx
      >>> from jmoe.nn import Linear
      ...
      >>> weight = jax.random.normal(jax.random.key(0), (32, 64))  # (out, in)
      >>> layer = Linear.from_dense(weight, recipe="fp8_block")
      >>> layer.weight.shape, layer.weight.dtype
      ((32, 64), dtype(float8_e4m3fn))
      >>> layer.weight_scale.shape
      (1, 1)
      >>> x = jax.random.normal(jax.random.key(1), (4, 64))
      >>> layer(x).shape
      (4, 32)

    Variables: ``weight`` (N, K) = (out, in), an ``nnx.Param``, or a ``QuantizedParam`` together with ``weight_scale``,
    ``weight_global_scale`` and ``weight_zero_point`` (shapes as in ``QTensor``); ``weight_input_scale``, float32 (),
    where the activation's scale is a given one; ``bias`` (N,). What is absent is None. In stacked modules each has a
    leading axis of layers.

    On a mesh whose axes ``sharding`` names, every device multiplies with its own part of the weight
    (``jmoe.parallel.linear``): N is split without communication, K with a sum over the devices.

    Args:
      in_features: K.
      out_features: N.
      use_bias: whether there is a bias (default: False).
      recipe: how weight and activation are quantized, a Recipe or its name (default: ``"bf16"``, not at all).
      activation: applied to the result: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu2"`` or None.
      dtype: what x is cast to (default: x's own dtype, which is then the result's).
      param_dtype: dtype of the bias and of an unquantized weight (default: bfloat16).
      preferred_element_type: dtype of the result (default: that of the cast x).
      sharding: the mesh axis over which each of the axes (out, in) is sharded, for Flax's sharding metadata; as in Flax
        a name needs a mesh in force (``jax.set_mesh``) or ``nnx.use_eager_sharding(False)``.
      implementation: taken by name (default: the selector's choice).
      rngs: keys of the initial weight; None (default) leaves weight and bias zero.

    Raises:
      ValueError: features that are not positive, an activation, recipe or implementation that is not known;
      TypeError: a dtype that nothing is computed in.
    """

    weight_names = ("weight",)
    bias_names = ("bias",)

    layer: Array | None
    weight: nnx.Variable
    weight_input_scale: nnx.Variable | None
    bias: nnx.Variable | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        recipe: Recipe | str = "bf16",
        activation: Activation | str | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        sharding: Sequence[AxisName] = (None, None),
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.in_features = options.extent("in_features", in_features)
        self.out_features = options.extent("out_features", out_features)
        options.check_rngs(rngs)
        options.check_activation(activation, 1)
        self.activation = activation
        self.dtype = options.optional_dtype("dtype", dtype)
        self.preferred_element_type = options.optional_dtype("preferred_element_type", preferred_element_type)
        param_dtype = float_dtype("param_dtype", param_dtype, COMPUTE_DTYPES)
        self.sharding = param.checked_axes("sharding", sharding, ("out", "in"))
        options.check_implementation(implementation)
        self.implementation = implementation
        self.layer = nnx.data(None)
        how = as_recipe(recipe)
        shape = (out_features, in_features)
        if rngs is None:
            weight = param.empty(shape, how, param_dtype)
        else:
            weight = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)(rngs.params(), shape, param_dtype)
            weight = weight if how.weight is None else quantize(weight, how)
        weight = param.prepared(weight, "linear", implementation)
        static = how.input is not None and how.input.static
        param.set_weight(self, "weight", weight, self.sharding, input_scale=1.0 if static else None, scale_shapes=[()])
        self.bias = nnx.data(None)
        if options.flag("use_bias", use_bias):
            self.set_bias(jnp.zeros((out_features,), param_dtype))

    @classmethod
    def from_dense(
        cls,
        weight: Array,
        bias: Array | None = None,
        *,
        recipe: Recipe | str = "bf16",
        input_scale: Array | float | None = None,
        **others: Any,
    ) -> Self:
        """A layer from a dense weight (N, K) = (out, in), quantized here.

        Args:
          weight: float (N, K).
          bias: (N,).
          recipe: as for the class; "bf16" takes the weight as it is, also in float16 or float32.
          input_scale: float32 (), where the recipe's activation scale is a given one.
          **others: as for ``from_quantized``.
        """
        how = as_recipe(recipe)
        weight = param.checked_weight("weight", weight)
        quantized = weight if how.weight is None else quantize(weight, how)
        ours = param.prepared(quantized, "linear", others.get("implementation"))
        return cls.from_quantized(ours, bias, input_scale=input_scale, **others)

    @classmethod
    def from_quantized(
        cls,
        weight: QTensor | Array,
        bias: Array | None = None,
        *,
        input_scale: Array | float | None = None,
        **others: Any,
    ) -> Self:
        """A layer from a weight as it is, a QTensor (N, K) or a plain array.

        Args:
          weight: QTensor (N, K); its ``input_scheme`` says how x is quantised.
          bias: (N,).
          input_scale: float32 (), where that scheme is static.
          **others: use_bias (zeros, of ``param_dtype``, where ``bias`` is not given), param_dtype, activation, dtype,
            preferred_element_type, sharding, implementation: as for the class.
        """
        options.refuse(others, ("recipe", "rngs"), "the weight that is given decides")
        weight = param.checked_weight("weight", weight)
        if len(weight.shape) < 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but it is (out, in)")
        out_features, in_features = weight.shape[-2:]
        layer = nnx.eval_shape(lambda: cls(in_features, out_features, **others))
        layer._put_weight(weight, input_scale)
        if bias is None and layer.bias is not None:
            bias = jnp.zeros((*weight.shape[:-2], out_features), layer.bias.get_raw_value().dtype)
        layer.set_bias(bias)
        return layer

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The leading axes that stacking has given to each variable, () of a single layer."""
        return param.stack_shape(self, "weight", 2)

    @property
    def qweight(self) -> Array | QTensor:
        """The weight as operations take it: a QTensor, or an array where it is not quantized."""
        return param.get_weight(self, "weight")

    @property
    def recipe(self) -> Recipe:
        """How weight and activation are quantized."""
        return param.recipe_of_weight(self, "weight")

    def set_weight(self, weight: Array | QTensor, *, input_scale: Array | float | None = None) -> None:
        """Replaces the weight, which may be quantized otherwise than the one before.

        Args:
          weight: QTensor or float array (..., N, K); leading axes are those that the module is stacked with.
          input_scale: float32 of the leading axes' shape, where the weight's input scheme is static; None keeps one
            that is there.

        Raises:
          ValueError: the shape differs, or an input scale is missing, not wanted, or no scale. The layer is as it was
            then.
        """
        weight = param.checked_weight("weight", weight)
        lead, own = param.stack_shape(self, "weight", 2), (self.out_features, self.in_features)
        if tuple(weight.shape) != (*lead, *own):
            meaning = "(..., out, in)" if lead else "(out, in)"
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but this layer's is {meaning} = {(*lead, *own)}")
        self._put_weight(weight, input_scale)

    def _put_weight(self, weight: Array | QTensor, input_scale: Array | float | None) -> None:
        shapes = [tuple(weight.shape[:-2])]
        param.set_weight(self, "weight", weight, self.sharding, input_scale=input_scale, scale_shapes=shapes)

    def set_bias(self, bias: Array | None) -> None:
        """Replaces the bias (..., N), or removes it; leading axes are those that the module is stacked with."""
        if bias is None:
            self.bias = nnx.data(None)
            return
        bias = param.checked_bias("bias", bias)
        expected = (*param.stack_shape(self, "weight", 2), self.out_features)
        if tuple(bias.shape) != expected:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but this layer's is {expected}")
        axes = self.sharding[:-1]
        self.bias = param.variable(nnx.Param, bias, (*(None,) * (bias.ndim - len(axes)), *axes))

    def __call__(self, x: Array | QTensor, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          x: (..., K) bfloat16, float16 or float32; or a QTensor quantized as the weight asks, which is not cast:
            ``dtype`` is then the result's.
          out_sharding: how the result is sharded, as for ``nnx.Linear``.

        Returns:
          (..., N).

        Raises:
          ValueError: x does not fit, or the module is a stack of layers; TypeError: x is no such array.
        """
        param.check_single(self)
        given: Any = x if isinstance(x, QTensor) else as_array("x", x)
        return mesh.apply(type(self)._apply, self, given, out_sharding, lambda: self._spec(given))

    def _spec(self, x: Array) -> PartitionSpec:
        spec = tuple(nnx.get_partition_spec(self.weight).get_value())
        return with_last(spec_of(x), spec[-2] if spec else None)

    def _apply(self, x: Array, tokens: mesh.Tokens) -> Array:
        bias, scale = param.value_of(self.bias), param.value_of(self.weight_input_scale)
        return self._product(x, self.qweight, bias, scale, tokens)

    def _product(
        self,
        x: Array,
        weight: Array | QTensor,
        bias: Array | None,
        input_scale: Array | None,
        tokens: mesh.Tokens = None,
    ) -> Array:
        preferred = self.preferred_element_type
        if isinstance(x, QTensor):
            preferred = self.dtype if preferred is None else preferred
        elif self.dtype is not None:
            x = x.astype(self.dtype)
        how: dict[str, Any] = {
            "bias": bias,
            "activation": self.activation,
            "input_scale": input_scale,
            "layer": self.layer,
            "preferred_element_type": preferred,
            "implementation": self.implementation,
        }
        out, into = param.split_axes(self.weight, 2)
        if not (out or into):
            return ops.linear(x, weight, **how)
        token_axes = mesh.tokens_beside(x.shape[:-1], tokens, (*out, *into))
        return parallel.linear(x, weight, out_axes=out, in_axes=into, token_axes=token_axes, **how)
