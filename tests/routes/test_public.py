from __future__ import annotations

from routebook import routes


def test_every_public_name_exists_once_and_in_order():
    assert list(routes.__all__) == sorted(set(routes.__all__))
    assert all(hasattr(routes, name) for name in routes.__all__)
