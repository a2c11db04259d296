"""What all processes must agree on about an embedding table: its size, its optimizer, its initial values.

A table is a matrix of float32, of which workers look up and train single rows. Row r lies on server r % servers: the
ids that are frequent are most often neighbours, because vocabularies are sorted by frequency, and so the servers share
them. Values only; nothing here imports JAX.
"""

import hashlib
import math
from typing import TYPE_CHECKING

import msgspec

from jaxrdma.control import LeafSpec
from jaxrdma.errors import ConfigError, MismatchError
from jaxrdma.policy import Async, Policy, SyncReplicas

if TYPE_CHECKING:
    from jaxrdma import _native

# Rows fit an int32, which is what ids are in JAX.
MOST_ROWS = 2**31 - 1

# Raised by any change to where rows lie, or to what they hold at first, so that digests of different rules differ.
_RULES = 1

_LONGEST_NAME = 128


class RowSGD(msgspec.Struct, frozen=True, tag=True):
    """`w -= learning_rate * g`, and with a momentum `m = momentum * m + g; w -= learning_rate * m`.

    **Arguments:**

    - `learning_rate`: more than 0.
    - `momentum`: from 0 on, below 1. It decays in the steps that touch a row, and not between them.
    """

    learning_rate: float
    momentum: float = 0.0


class RowAdagrad(msgspec.Struct, frozen=True, tag=True):
    """`s += g**2; w -= learning_rate * g / sqrt(s + eps)`: as `optax.adagrad`.

    **Arguments:**

    - `learning_rate`: more than 0.
    - `initial_accumulator`: of `s`, from 0 on.
    - `eps`: more than 0.
    """

    learning_rate: float
    initial_accumulator: float = 0.1
    eps: float = 1e-7


class RowAdam(msgspec.Struct, frozen=True, tag=True):
    """Adam as `optax.adam`, with moments and a count of steps for each row, which only change when the row is touched.

    **Arguments:**

    - `learning_rate`: more than 0.
    - `b1`, `b2`: decays of the moments, from 0 on, below 1.
    - `eps`: more than 0.
    """

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


class RowConstant(msgspec.Struct, frozen=True, tag=True):
    """Every element is `value` at first."""

    value: float = 0.0


class RowUniform(msgspec.Struct, frozen=True, tag=True):
    """Elements are drawn between `low` and `high` at first, by `seed`, row and column alone."""

    low: float
    high: float
    seed: int = 0


class RowNormal(msgspec.Struct, frozen=True, tag=True):
    """Elements are drawn from a normal distribution around 0 at first, by `seed`, row and column alone."""

    stddev: float = 0.01
    seed: int = 0


RowOptimizer = RowSGD | RowAdagrad | RowAdam
RowInit = RowConstant | RowUniform | RowNormal


class TableSettings(msgspec.Struct, frozen=True):
    """A table, as every process knows it."""

    name: str
    rows: int
    columns: int
    optimizer: RowOptimizer
    init: RowInit

    @property
    def leaf(self) -> LeafSpec:
        """How the coordinator sees it: one leaf."""
        return LeafSpec(f"embedding[{self.name!r}]", (self.rows, self.columns), "float32")

    def digest(self, servers: int, partition_bytes: int) -> str:
        """Equal on two processes exactly if rows lie alike for them, and travel alike."""
        content = (_RULES, self.rows, self.columns, servers, partition_bytes)
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    def fingerprint(self) -> str:
        """All of it as text, which workers compare, and servers read."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_fingerprint(cls, text: str) -> "TableSettings":
        """What `fingerprint` was made of.

        **Raises:** `MismatchError` if that is no table of this version.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise MismatchError(
                f"a table that is proposed as {text!r} is none here ({error}): install the same jaxrdma everywhere"
            ) from None

    def text(self, servers: int) -> str:
        """In one line, for people."""
        size = self.rows * self.columns * 4
        where = "on one server" if servers == 1 else f"row r on server r % {servers}"
        return (
            f"table {self.name!r}: {self.rows:,} rows of {self.columns} columns, {where}; {size:,} bytes once all are "
            "trained, beside the optimizer's"
        )


def check_settings(settings: TableSettings, partition_bytes: int) -> None:
    """Refuse what no server could hold.

    **Raises:** `ConfigError`, naming the table and the argument.
    """
    name, optimizer, init = settings.name, settings.optimizer, settings.init

    def refuse(what: str, expected: str, got: object) -> ConfigError:
        return ConfigError(f"embedding {name!r}: {what}: expected {expected}, got {got!r}")

    # The annotations are a promise of the caller's only.
    types: list[tuple[str, object, type | tuple[type, ...]]] = [
        ("name", name, str),
        ("rows", settings.rows, int),
        ("columns", settings.columns, int),
        ("optimizer", optimizer, (RowSGD, RowAdagrad, RowAdam)),
        ("init", init, (RowConstant, RowUniform, RowNormal)),
    ]
    for what, value, kind in types:
        if not isinstance(value, kind) or isinstance(value, bool):
            names = kind if isinstance(kind, tuple) else (kind,)
            raise refuse(what, " or ".join(each.__name__ for each in names), value)
    if not 0 < len(name) <= _LONGEST_NAME:
        raise refuse("name", f"1 to {_LONGEST_NAME} characters", name)
    if not 0 < settings.rows <= MOST_ROWS:
        raise refuse("rows", f"1 to {MOST_ROWS:,}", settings.rows)
    need = 8 + 4 + 4 * settings.columns  # one row on its way to a server
    if settings.columns < 1 or need > partition_bytes:
        raise refuse(
            "columns",
            f"1 to {(partition_bytes - 12) // 4:,}, so that a row fits JAXRDMA_PARTITION_BYTES={partition_bytes}",
            settings.columns,
        )
    for struct in (optimizer, init):
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            what = f"{type(struct).__name__}({field.name}=)"
            if field.type is int:
                if not isinstance(value, int) or not 0 <= value < 2**64:
                    raise refuse(what, "an integer from 0 on, below 2**64", value)
            elif not isinstance(value, (int, float)) or not math.isfinite(value):
                raise refuse(what, "a finite number", value)
            elif abs(value) > 3e38:
                raise refuse(what, "a float32", value)
            elif field.name in ("learning_rate", "eps") and value <= 0:
                raise refuse(what, "more than 0", value)
            elif field.name in ("momentum", "b1", "b2") and not 0 <= value < 1:
                raise refuse(what, "from 0 on, below 1", value)
            elif field.name in ("initial_accumulator", "stddev") and value < 0:
                raise refuse(what, "from 0 on", value)
    if isinstance(init, RowUniform) and init.low > init.high:
        raise refuse("RowUniform(high=)", f"at least low={init.low}", init.high)


def table_policy(name: str, policy: Policy | None, num_workers: int) -> Policy:
    """The complete policy of a table.

    **Raises:** `ConfigError` for one that tables cannot have, with those that they can.
    """
    complete = (policy if policy is not None else SyncReplicas()).complete(num_workers)
    cure = "use SyncReplicas(), with on_loss='fail', or Async()"
    if isinstance(complete, SyncReplicas):
        if complete.replicas_to_aggregate != num_workers:
            raise ConfigError(
                f"embedding {name!r}: {complete.describe()}: a mean of rows takes one push of each of the "
                f"{num_workers} workers; {cure}"
            )
        if complete.on_loss != "fail":
            raise ConfigError(
                f"embedding {name!r}: on_loss={complete.on_loss!r}: a step of a table whose worker is lost cannot be "
                f"ended without it; {cure}"
            )
    elif not isinstance(complete, Async):
        raise ConfigError(f"embedding {name!r}: {complete.describe()}: {cure}")
    return complete


def native_spec(number: int, settings: TableSettings, policy: Policy) -> "_native.TableSpec":
    """What the engines are told of table `number`."""
    from jaxrdma import _native

    rule, rate, momentum, decay, eps, accumulator = _native.RowRule.SGD, 0.0, 0.0, 0.0, 1e-8, 0.0
    match settings.optimizer:
        case RowSGD(rate, momentum):
            rule = _native.RowRule.MOMENTUM if momentum else _native.RowRule.SGD
        case RowAdagrad(rate, accumulator, eps):
            rule = _native.RowRule.ADAGRAD
        case RowAdam(rate, momentum, decay, eps):
            rule = _native.RowRule.ADAM
    start, a, b, seed = _native.RowInit.CONSTANT, 0.0, 0.0, 0
    match settings.init:
        case RowConstant(a):
            pass
        case RowUniform(a, b, seed):
            start = _native.RowInit.UNIFORM
        case RowNormal(b, seed):
            start = _native.RowInit.NORMAL
    return _native.TableSpec(
        id=number,
        name=settings.name,
        rows=settings.rows,
        columns=settings.columns,
        rule=rule,
        rate=rate,
        momentum=momentum,
        decay=decay,
        epsilon=eps,
        accumulator=accumulator,
        init=start,
        a=a,
        b=b,
        seed=seed,
        asynchronous=isinstance(policy, Async),
    )
