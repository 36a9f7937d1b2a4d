"""Tiny tensors: one thread is as fast as many, and does not wait for the others on a busy machine."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    # How work is divided among threads is one of the things that batch-invariance must survive.
    if request.path.stem != "test_invariant":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
