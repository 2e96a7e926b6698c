"""The examples in docstrings run and print what they say."""

import doctest

import pytest

from jmoe.models import decoder
from jmoe.nn import convert, linear, moe


@pytest.mark.parametrize("module", [convert, decoder, linear, moe], ids=lambda module: module.__name__)
def test_examples(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
