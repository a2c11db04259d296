"""What tests of jobs share: another machine."""

from collections.abc import Iterator

import pytest

from tests.cluster.namespace import Namespace, make_namespace


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """Another network namespace, as another machine."""
    with make_namespace() as made:
        yield made
