"""The plan's tensors beside those of the models themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models import registry
from prl.models.spec import ARCHITECTURES, read_spec
from prl.plan.weights import shapes, weights
from tests.models.configs import GLM_4_5_AIR, GLM_5, TINY

CLASSES = {folder: name for name, folder in ARCHITECTURES.items()}
ALL = {"GLM-5": GLM_5, "GLM-4.5-Air": GLM_4_5_AIR} | {
    name: tiny | {"architectures": [CLASSES[name.partition("-")[0]]]} for name, tiny in TINY.items()
}


@pytest.mark.parametrize("name", ALL)
def test_names_shapes_and_types_are_the_models(name: str) -> None:
    spec = read_spec(ALL[name])
    config = RunConfig.model_validate({"model": {"architecture": ALL[name], "dtype": "bfloat16"}})
    own = registry.build(spec, dtype=torch.bfloat16, device="meta").state_dict()
    assert shapes(spec) == {n: tuple(t.shape) for n, t in own.items()}
    assert {w.name: w.element for w in weights(spec, config, MeshShape())} == {n: t.element_size() for n, t in own.items()}


def test_it_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, prl.plan.memory; assert 'torch' not in sys.modules"], check=True)
