"""The plan's tensors beside those of the models themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models import registry
from prl.models.precision import chosen
from prl.models.spec import ARCHITECTURES, read_spec
from prl.plan.weights import can_be_fp8, shapes, weights
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


PATTERNS = ([".*"], [r".*\.mlp\.experts"], [r".*\.self_attn\..*"])


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
@pytest.mark.parametrize("name", ["GLM-5", "GLM-4.5-Air"])
def test_what_computes_in_fp8_is_what_the_model_chooses(name: str, patterns: list[str]) -> None:
    spec = read_spec(ALL[name])
    own = chosen(registry.build(spec, device="meta"), patterns, "")
    found = {n.rpartition(".")[0] for n, s in shapes(spec).items() if can_be_fp8(n, s, patterns)}
    assert sorted(found) == own


def test_it_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, prl.plan.memory; assert 'torch' not in sys.modules"], check=True)
