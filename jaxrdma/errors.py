"""One exception per kind of failure, each saying who, what was expected, what came, and what to try."""


class JaxRdmaError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(JaxRdmaError):
    """The description of the cluster, or an argument, is wrong or incomplete."""


class ConnectError(JaxRdmaError):
    """Start-up failed: a process could not be reached, did not come in time, or was refused."""


class MismatchError(JaxRdmaError):
    """Two processes of a job disagree on a leaf, a plan, a setting or a version."""


class PlanError(JaxRdmaError):
    """A leaf cannot be trained: its dtype or size has no place in a plan."""


class UpdateError(JaxRdmaError):
    """An update cannot be exported, failed on a server, or needs more than its own leaf."""


class PeerFailedError(JaxRdmaError):
    """Another process of the job died, fell silent, raised or left; the text names the first cause.

    **Attributes:**

    - `kind`: what happened, as `JobFailed.kind` has it: "died", "silent", "raised", ...
    - `role`, `index`: who it was; `index` is -1 for the coordinator.
    """

    def __init__(self, text: str, *, kind: str = "", role: str = "", index: int = -1) -> None:
        super().__init__(text)
        self.kind = kind
        self.role = role
        self.index = index


class JobEndedError(JaxRdmaError):
    """The job that is followed has ended in good order: there will be no newer parameters."""


class StepError(JaxRdmaError):
    """The step of a state is older or newer than the servers'."""


class TransportError(JaxRdmaError):
    """A data connection failed, or the transport asked for is not there."""


class CancelledError(JaxRdmaError):
    """The operation was interrupted or its session closed on this side."""
