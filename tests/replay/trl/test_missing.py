"""Without TRL the trainer is not there, and says what to install."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from routebook.errors import MissingExtraError


def test_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("routebook.replay.trl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError, match=r"needs 'trl'.*routebook\[trl\]"):
        import_module("routebook.replay.trl")
