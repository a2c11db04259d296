"""Between Python and the native module: statuses to exceptions, plans to flow specs."""

import math
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar, cast

from numpy.typing import NDArray

from jaxrdma import _native, errors
from jaxrdma.cluster import ClusterSpec
from jaxrdma.devices import Candidate
from jaxrdma.plan import ITEM_BYTES, Plan

T = TypeVar("T")

_EXCEPTIONS: dict[_native.Code, type[errors.JaxRdmaError]] = {
    _native.Code.INVALID_ARGUMENT: errors.ConfigError,
    _native.Code.UNAVAILABLE: errors.TransportError,
    _native.Code.PERMISSION_DENIED: errors.ConnectError,
    _native.Code.PROTOCOL: errors.TransportError,
    _native.Code.RESOURCE: errors.TransportError,
    _native.Code.STALE: errors.StepError,
    _native.Code.DEADLINE: errors.ConnectError,
    _native.Code.CANCELLED: errors.CancelledError,
    _native.Code.PEER_FAILED: errors.PeerFailedError,
    _native.Code.INTERNAL: errors.JaxRdmaError,
}


def native_error(status: _native.Status) -> errors.JaxRdmaError:
    """The exception that a failed status stands for."""
    return _EXCEPTIONS[status.code](status.message)


def raise_for(result: T | _native.Status) -> T:
    """`result`, unless it is a failure.

    **Raises:** the exception of the status's code.
    """
    if isinstance(result, _native.Status) and not result.ok:
        raise native_error(result)
    # A status that is ok stands for itself: T is Status then.
    return cast(T, result)


class TransportArguments(TypedDict):
    transport: str
    spin_us: int
    verbs: _native.VerbsOptions
    fault: str


def transport_options(
    spec: ClusterSpec, transport: str = "tcp", choices: Sequence[Candidate] = ()
) -> TransportArguments:
    """What both engines are told of how tensors travel; over verbs, `choices` are what to use, a device each."""
    verbs = _native.VerbsOptions()
    # Where the control plane goes by the same cable, the link is named before anybody is called silent.
    verbs.link_timeout_ms = min(verbs.link_timeout_ms, int(spec.heartbeat_timeout * 500))
    for name, value in vars(spec.verbs).items():
        if name == "link_timeout" and value is not None:
            verbs.link_timeout_ms = int(value * 1000)
        elif name not in ("device", "port", "gid_index") and value is not None:
            setattr(verbs, name, value)
    verbs.sources = _sources(spec, choices)
    spin_us = spec.spin_us if spec.spin_us is not None else _native.DEFAULT_SPIN_US
    return {"transport": transport, "spin_us": spin_us, "verbs": verbs, "fault": spec.own_fault}


def _sources(spec: ClusterSpec, choices: Sequence[Candidate]) -> list[_native.VerbsSource]:
    """Where to send from: `choices`, or what the settings name."""
    index = -1 if spec.verbs.gid_index is None else spec.verbs.gid_index
    if not choices:
        return [
            _native.VerbsSource(device=name, port=spec.verbs.port or 0, gid_index=index)
            for name in spec.verbs.device or ("",)
        ]
    return [
        _native.VerbsSource(
            device=choice.device,
            port=choice.port.number,
            gid_index=index,
            # The address, because its index changes when a link comes back.
            gid=choice.gid.raw,
            gid_type=choice.gid.type,
        )
        for choice in choices
    ]


_FLOW_MODES = {
    "update": _native.FlowMode.UPDATE,
    "average": _native.FlowMode.AVERAGE,
    "ema": _native.FlowMode.SHOW,
}


def shard_views(
    engine: _native.ServerEngine, flow: int, plan: Plan, what: str
) -> tuple[NDArray[Any], ...]:
    """NumPy views of what a server has of each leaf, empty where it holds nothing of a leaf. Its memory stays there.

    `what`: "parameters", or "gradient": their means.
    """
    import ml_dtypes

    views: list[NDArray[Any]] = []
    for index, leaf in enumerate(plan.leaves):
        dtype = leaf.dtype
        if what == "gradient":
            dtype = "float64" if ITEM_BYTES[leaf.dtype] == 8 else "float32"
        raw: NDArray[Any] = raise_for(getattr(engine, what)(flow, index))
        # ml_dtypes knows bfloat16, which NumPy does not by itself.
        views.append(raw.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    return tuple(views)


class ShardViews:
    """`shard_views` of the flows of a server, each made once: what is viewed stays where it is."""

    def __init__(self, engine: _native.ServerEngine) -> None:
        self._engine = engine
        self._made: dict[tuple[int, str], tuple[NDArray[Any], ...]] = {}

    def get(self, flow: int, plan: Plan, what: str) -> tuple[NDArray[Any], ...]:
        """As `shard_views`; `plan` is that of `flow`."""
        key = flow, what
        if key not in self._made:
            self._made[key] = shard_views(self._engine, flow, plan, what)
        return self._made[key]


def flow_spec(flow: int, mode: str, plan: Plan, held: int = 0) -> _native.FlowSpec:
    """The native half of `plan`. `mode`, `held`: as in `control.FlowProposal`."""
    wire = plan.wire
    return _native.FlowSpec(
        id=flow,
        mode=_FLOW_MODES[mode],
        dtypes=[getattr(_native.DType, leaf.dtype) for leaf in wire.leaves],
        elements=[math.prod(leaf.shape) for leaf in wire.leaves],
        partitions=[(p.leaf, p.server, p.begin, p.elements) for p in wire.partitions],
        held=held,
        members=[(m.leaf, m.begin, m.elements) for m in wire.members] if plan.packs else [],
    )
