"""How many examples the tests of this folder try. A search of ten minutes or so: `FUZZ_EXAMPLES=10000`."""

import os

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))


def search(share: float = 1.0):
    """Settings of a test that takes this share of the examples."""
    return settings(
        deadline=None,
        max_examples=max(1, int(EXAMPLES * share)),
        suppress_health_check=list(HealthCheck),
    )


# On a slow machine an example takes some tens of milliseconds.
patience = pytest.mark.timeout(120 + EXAMPLES // 4)
