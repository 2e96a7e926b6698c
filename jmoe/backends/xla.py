"""Compiled by XLA on any device, with bounded memory."""

from jax import Array

from jmoe.backends import reference
from jmoe.backends.spec import BatchedArgs, DeviceSpec, LinearArgs, MoEArgs, OpSpec, Plan, Selection

NAME = "xla"


def plan(op: OpSpec, device: DeviceSpec, *, explicit: bool) -> Plan:
    return Plan()


def linear(op: OpSpec, selection: Selection, args: LinearArgs) -> Array:
    return reference.linear(op, selection, args)


def fused_moe(op: OpSpec, selection: Selection, args: MoEArgs) -> Array:
    return reference.fused_moe(op, selection, args)


def batched_experts(op: OpSpec, selection: Selection, args: BatchedArgs) -> Array:
    return reference.batched_experts(op, selection, args)
