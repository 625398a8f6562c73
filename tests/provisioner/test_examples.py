"""Do the examples in the provisioner's docstrings say what the code does?"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from provisioner import core, providers

MODULES = [
    module.name
    for package in (core, providers)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
