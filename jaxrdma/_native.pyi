"""The native engines of jaxrdma. Not a public interface."""

import enum
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType

class Code(enum.Enum):
    OK = 0

    INVALID_ARGUMENT = 1

    UNAVAILABLE = 2

    PERMISSION_DENIED = 3

    PROTOCOL = 4

    RESOURCE = 5

    STALE = 6

    DEADLINE = 7

    CANCELLED = 8

    PEER_FAILED = 9

    INTERNAL = 10

class Status:
    def __init__(self, code: Code, message: str) -> None: ...
    @property
    def ok(self) -> bool: ...
    @property
    def code(self) -> Code: ...
    @property
    def message(self) -> str: ...

class DType(enum.Enum):
    float32 = 0

    float64 = 1

    float16 = 2

    bfloat16 = 3

class FlowMode(enum.Enum):
    AVERAGE = 0

    UPDATE = 1

    SHOW = 2

class FlowSpec:
    def __init__(
        self,
        id: int,
        mode: FlowMode,
        dtypes: Sequence[DType],
        elements: Sequence[int],
        partitions: Sequence[Sequence[int]],
        held: int = 0,
        members: Sequence[Sequence[int]] = [],
    ) -> None: ...
    @property
    def id(self) -> int: ...

class RowRule(enum.Enum):
    SGD = 0

    MOMENTUM = 1

    ADAGRAD = 2

    ADAM = 3

class RowInit(enum.Enum):
    CONSTANT = 0

    UNIFORM = 1

    NORMAL = 2

class TableSpec:
    def __init__(
        self,
        *,
        id: int,
        name: str,
        rows: int,
        columns: int,
        rule: RowRule,
        rate: float,
        momentum: float,
        decay: float,
        epsilon: float,
        accumulator: float,
        init: RowInit,
        a: float,
        b: float,
        seed: int,
        asynchronous: bool,
    ) -> None: ...
    @property
    def id(self) -> int: ...

def check_table(spec: TableSpec, slot_payload_bytes: int) -> Status: ...

MOST_ROWS: int = 2147483647

DEFAULT_SPIN_US: int

MOST_DEVICES: int = 4
PROTOCOL_VERSION: int = 9

TOKEN_BYTES: int = 16

def stage_name(arg: int, /) -> str: ...

class OperationKind(enum.Enum):
    EXCHANGE = 0

    PUSH = 1

    PULL = 2

    INIT = 3

    FETCH = 4

    READ = 5

    FOLLOW = 6

    PUSH_ROWS = 7

    PULL_ROWS = 8

class Pending:
    @property
    def server(self) -> int: ...
    @property
    def flow(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def stage(self) -> str: ...
    @property
    def seconds(self) -> float: ...

class VerbsSource:
    device: str
    port: int
    gid_index: int
    gid: bytes
    gid_type: str
    def __init__(
        self,
        device: str = "",
        port: int = 0,
        gid_index: int = -1,
        gid: bytes = ...,
        gid_type: str = "",
    ) -> None: ...

class VerbsOptions:
    sources: list[VerbsSource]
    pkey_index: int
    traffic_class: int
    service_level: int
    timeout: int
    retry_count: int
    link_timeout_ms: int

class WorkerStats:
    @property
    def bytes_pushed(self) -> int: ...
    @property
    def bytes_pulled(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def gradients_accepted(self) -> int: ...
    @property
    def gradients_dropped(self) -> int: ...
    @property
    def dropped_of_flow(self) -> list[int]: ...
    @property
    def last_step(self) -> int: ...
    @property
    def last_read(self) -> int: ...

class WorkerEngine:
    @staticmethod
    def create(
        worker: int,
        job: str,
        incarnation: int,
        spin_us: int = 0,
        transport: str = "tcp",
        verbs: VerbsOptions = ...,
        follows: bool = False,
        fault: str = "",
        sent_timeout_ms: int = 10_000,
    ) -> WorkerEngine | Status: ...
    def connect(
        self, addresses: Sequence[str], tokens: Sequence[bytes], timeout_ms: int
    ) -> Status: ...
    def add_flow(self, spec: FlowSpec) -> Status: ...
    def add_table(self, spec: TableSpec) -> Status: ...
    def run_operation(
        self,
        kind: OperationKind,
        flow: int,
        step: int,
        sources: Sequence[
            Annotated[
                NDArray[numpy.uint8],
                {"shape": (None,), "order": "C", "device": "cpu", "writable": False},
            ]
            | None
        ],
        targets: Sequence[
            Annotated[NDArray[numpy.uint8], {"shape": (None,), "order": "C", "device": "cpu"}]
            | None
        ],
        spec: FlowSpec,
    ) -> Status: ...
    def follow(
        self,
        flow: int,
        step: int,
        targets: Sequence[
            Annotated[NDArray[numpy.uint8], {"shape": (None,), "order": "C", "device": "cpu"}]
            | None
        ],
        spec: FlowSpec,
        timeout_ms: int = -1,
    ) -> int | Status: ...
    def stop_waiting(self) -> None: ...
    def repeat_operation(
        self,
        kind: OperationKind,
        flow: int,
        first_step: int,
        count: int,
        sources: Sequence[
            Annotated[
                NDArray[numpy.uint8],
                {"shape": (None,), "order": "C", "device": "cpu", "writable": False},
            ]
            | None
        ],
        targets: Sequence[
            Annotated[NDArray[numpy.uint8], {"shape": (None,), "order": "C", "device": "cpu"}]
            | None
        ],
        spec: FlowSpec,
    ) -> list[float] | Status: ...
    def fail(self, why: Status) -> None: ...
    def interrupt(self) -> None: ...
    def await_sent(self) -> Status: ...
    def in_flight(self) -> int: ...
    def pending(self, limit: int = 16) -> list[Pending]: ...
    def stats(self) -> WorkerStats: ...
    def records(self) -> bytes: ...
    def record_counts(self) -> tuple[int, int]: ...
    @property
    def transport(self) -> str: ...
    @property
    def notice(self) -> str: ...
    @property
    def trouble(self) -> str: ...
    @property
    def status(self) -> Status: ...
    def wait_failure(self, timeout_ms: int = -1) -> bool: ...
    def close(self) -> None: ...

def register_session(session: int, engine: WorkerEngine) -> None: ...
def forget_session(session: int) -> None: ...
def take_end(session: int) -> Status: ...
def exit_with(code: int) -> None: ...
def cpu_handler() -> CapsuleType: ...
def rows_handler() -> CapsuleType: ...
def exception_hook(hook: Callable[..., object]) -> object: ...

class ServerEvent:
    class Kind(enum.Enum):
        NONE = 0

        INITIALISED = 1

        STEP_READY = 2

        WORKER_LOST = 3

        VIOLATION = 4

        STRANDED = 5

        WOKEN = 6

        CLOSED = 7

        GRADIENT = 8

        FOLLOWER_REFUSED = 9

    @property
    def kind(self) -> ServerEvent.Kind: ...
    @property
    def flow(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def gradient(self) -> tuple[int, int, int]: ...

class ServerStats:
    @property
    def bytes_pushed(self) -> int: ...
    @property
    def bytes_pulled(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def accepted(self) -> list[int]: ...
    @property
    def dropped(self) -> list[int]: ...
    @property
    def gradients_dropped(self) -> list[int]: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def bytes_followed(self) -> int: ...
    @property
    def copies(self) -> int: ...

class Lack:
    @property
    def worker(self) -> int: ...
    @property
    def flow(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class ServerEngine:
    @staticmethod
    def create(
        server: int,
        servers: int,
        workers: int,
        job: str,
        listen: str,
        partition_bytes: int,
        slots_per_worker: int = 16,
        reduce_threads: int = 2,
        ordered: bool = False,
        spin_us: int = 0,
        transport: str = "tcp",
        verbs: VerbsOptions = ...,
        followers: int = 64,
        fault: str = "",
    ) -> ServerEngine | Status: ...
    @property
    def address(self) -> str: ...
    def admit(self, worker: int, incarnation: int, token: bytes) -> Status: ...
    def admit_follower(self, follower: int, incarnation: int, token: bytes) -> Status: ...
    def dismiss_follower(self, follower: int, why: str) -> None: ...
    def add_flow(self, spec: FlowSpec) -> Status: ...
    def add_table(self, spec: TableSpec) -> Status: ...
    def wait_event(self, timeout_ms: int = -1) -> ServerEvent: ...
    def wake(self) -> None: ...
    def gradient(
        self, flow: int, leaf: int
    ) -> Annotated[NDArray[numpy.uint8], {"shape": (None,), "device": "cpu"}] | Status: ...
    def parameters(
        self, flow: int, leaf: int
    ) -> Annotated[NDArray[numpy.uint8], {"shape": (None,), "device": "cpu"}] | Status: ...
    def publish(self, flow: int, step: int) -> Status: ...
    def refresh(self, flow: int) -> Status: ...
    def aggregate(
        self, flow: int, step: int, gradients: Sequence[tuple[int, int, int]]
    ) -> Status: ...
    def drop(self, flow: int, gradient: tuple[int, int, int]) -> Status: ...
    def answer(
        self, flow: int, gradient: tuple[int, int, int], step: int, accepted: bool
    ) -> Status: ...
    def mark_left(self, worker: int) -> None: ...
    def expel(self, worker: int, why: str) -> None: ...
    def lacking(self, limit: int = 16) -> list[Lack]: ...
    def stats(self) -> ServerStats: ...
    def records(self) -> bytes: ...
    def record_counts(self) -> tuple[int, int]: ...
    @property
    def transport(self) -> str: ...
    def close(self) -> None: ...

def ibverbs_path() -> str | Status: ...

class RdmaGid:
    @property
    def index(self) -> int: ...
    @property
    def gid(self) -> bytes: ...
    @property
    def type(self) -> str: ...
    @property
    def net_device(self) -> str: ...

class RdmaPort:
    @property
    def number(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def link_layer(self) -> str: ...
    @property
    def active_mtu(self) -> int: ...
    @property
    def max_message(self) -> int: ...
    @property
    def lid(self) -> int: ...
    @property
    def pkeys(self) -> list[int]: ...
    @property
    def gids(self) -> list[RdmaGid]: ...

class RdmaDevice:
    @property
    def name(self) -> str: ...
    @property
    def firmware(self) -> str: ...
    @property
    def max_qp(self) -> int: ...
    @property
    def max_qp_wr(self) -> int: ...
    @property
    def max_cqe(self) -> int: ...
    @property
    def max_mr_size(self) -> int: ...
    @property
    def ports(self) -> list[RdmaPort]: ...
    @property
    def problem(self) -> str: ...

def rdma_devices() -> list[RdmaDevice] | Status: ...
def explain_no_device() -> str: ...
def explain_open(device: str, error: int) -> str: ...
