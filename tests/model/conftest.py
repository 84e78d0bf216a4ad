"""What tests of the model side share: tiny backbones of one module, loaded when they are first asked for."""

from __future__ import annotations

import pytest
from backbone_runners import backbone_runner


@pytest.fixture(scope="module")
def runners_of(tmp_path_factory):
    """The `ModelRunner` of a tiny backbone by name; a module may change its weights."""
    root, made = tmp_path_factory.mktemp("cases"), {}

    def runner(name: str):
        if name not in made:
            made[name] = backbone_runner(name, root)
        return made[name]

    return runner
