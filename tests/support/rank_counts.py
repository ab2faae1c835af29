"""How many ranks a test runs on: one to four, of which most are for make test-long."""

import pytest

__all__ = ["one_to_four"]


def one_to_four(*by_default: int) -> pytest.MarkDecorator:
    """Parametrizes ``ranks``. Three find what two hide: a part in the middle, and sizes that do not divide."""
    cases = [ranks if ranks in by_default else pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2, 3, 4)]
    return pytest.mark.parametrize("ranks", cases)
