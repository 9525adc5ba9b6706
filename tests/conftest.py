"""What all tests share: the event loop, and how hard Hypothesis tries."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A shared machine is slow at times; how long an example takes is no property of ours.
settings.register_profile("kvass", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=3000)
settings.load_profile("kvass")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
