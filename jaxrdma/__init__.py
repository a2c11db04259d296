"""Parameter-server training for JAX: push gradients, pull parameters, inside `jit`.

Importing this package does no work and loads neither JAX nor the native module: each name is loaded when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrdma.cluster import ClusterSpec as ClusterSpec
    from jaxrdma.embedding import RowAdagrad as RowAdagrad
    from jaxrdma.embedding import RowAdam as RowAdam
    from jaxrdma.embedding import RowConstant as RowConstant
    from jaxrdma.embedding import RowNormal as RowNormal
    from jaxrdma.embedding import RowSGD as RowSGD
    from jaxrdma.embedding import RowUniform as RowUniform
    from jaxrdma.errors import CancelledError as CancelledError
    from jaxrdma.errors import ConfigError as ConfigError
    from jaxrdma.errors import ConnectError as ConnectError
    from jaxrdma.errors import JaxRdmaError as JaxRdmaError
    from jaxrdma.errors import JobEndedError as JobEndedError
    from jaxrdma.errors import MismatchError as MismatchError
    from jaxrdma.errors import PeerFailedError as PeerFailedError
    from jaxrdma.errors import PlanError as PlanError
    from jaxrdma.errors import StepError as StepError
    from jaxrdma.errors import TransportError as TransportError
    from jaxrdma.errors import UpdateError as UpdateError
    from jaxrdma.follower import Follower as Follower
    from jaxrdma.follower import Snapshot as Snapshot
    from jaxrdma.follower import follow as follow
    from jaxrdma.local import local_cluster as local_cluster
    from jaxrdma.policy import Async as Async
    from jaxrdma.policy import BoundedStaleness as BoundedStaleness
    from jaxrdma.policy import SyncReplicas as SyncReplicas
    from jaxrdma.session import Session as Session
    from jaxrdma.session import Stats as Stats
    from jaxrdma.session import connect as connect
    from jaxrdma.step import AverageState as AverageState
    from jaxrdma.step import PSState as PSState
    from jaxrdma.step import Ticket as Ticket
    from jaxrdma.step import average_gradients as average_gradients
    from jaxrdma.step import ps_step as ps_step
    from jaxrdma.step import pull as pull
    from jaxrdma.step import push as push
    from jaxrdma.table import Embedding as Embedding

__version__ = "0.1.0"

_HOME = {
    "ClusterSpec": "cluster",
    "RowAdagrad": "embedding",
    "RowAdam": "embedding",
    "RowConstant": "embedding",
    "RowNormal": "embedding",
    "RowSGD": "embedding",
    "RowUniform": "embedding",
    "CancelledError": "errors",
    "ConfigError": "errors",
    "ConnectError": "errors",
    "JaxRdmaError": "errors",
    "JobEndedError": "errors",
    "MismatchError": "errors",
    "PeerFailedError": "errors",
    "PlanError": "errors",
    "StepError": "errors",
    "TransportError": "errors",
    "UpdateError": "errors",
    "Follower": "follower",
    "Snapshot": "follower",
    "follow": "follower",
    "local_cluster": "local",
    "Async": "policy",
    "BoundedStaleness": "policy",
    "SyncReplicas": "policy",
    "Session": "session",
    "Stats": "session",
    "connect": "session",
    "AverageState": "step",
    "PSState": "step",
    "Ticket": "step",
    "average_gradients": "step",
    "ps_step": "step",
    "pull": "step",
    "push": "step",
    "Embedding": "table",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'jaxrdma' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxrdma.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
