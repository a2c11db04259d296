"""The exceptions: one family, and what they carry."""

import pickle

import pytest

from jaxrdma import errors
from jaxrdma.control import FlowRejected, JobFailed, job_error


def test_every_error_is_a_jaxrdma_error():
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) >= 10
    assert all(issubclass(kind, errors.JaxRdmaError) and kind.__doc__ for kind in kinds)


def test_peer_failed_error_says_who():
    error = errors.PeerFailedError("worker 1 died", kind="died", role="worker", index=1)
    assert (str(error), error.kind, error.role, error.index) == (
        "worker 1 died",
        "died",
        "worker",
        1,
    )
    assert str(pickle.loads(pickle.dumps(error))) == "worker 1 died"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (JobFailed("died", "x", "worker", 1), errors.PeerFailedError),
        (JobFailed("coordinator_lost", "x", "coordinator", -1), errors.PeerFailedError),
        (JobFailed("timeout", "x", "coordinator", -1), errors.ConnectError),
        (JobFailed("mismatch", "x", "worker", 1), errors.MismatchError),
        (FlowRejected(0, "x"), errors.MismatchError),
    ],
)
def test_a_failed_job_raises_the_exception_of_its_kind(message, kind):
    assert type(job_error(message)) is kind
    assert str(job_error(message)) == "x"
