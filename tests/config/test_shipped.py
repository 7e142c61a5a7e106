"""The shipped configurations of large models: sound but for the engine that nothing starts yet, and the mesh each says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from prl.config.load import ConfigError, dump, load, load_resolved
from prl.config.mesh import MeshShape, resolve
from prl.models.spec import read_spec
from prl.tokenizer import characters
from tests.models.configs import GLM_4_5_AIR, GLM_5

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = {
    "sft_glm45_air": (GLM_4_5_AIR, MeshShape(1, 4, 8, 8)),
    "rl_glm45_air": (GLM_4_5_AIR, MeshShape(1, 4, 4, 8)),
    "rl_intellect3": (GLM_4_5_AIR, MeshShape(1, 16, 8, 8)),
    "sft_glm5": (GLM_5, MeshShape(1, 16, 8, 8)),
    "rl_glm5": (GLM_5, MeshShape(1, 16, 8, 16)),
    "rl_glm5_20": (GLM_5, MeshShape(1, 16, 8, 16)),
    "rl_glm5_16": (GLM_5, MeshShape(1, 8, 8, 32)),
}
PRECISION = {
    "rl_glm45_air": ("fp8", "fp8"),
    "rl_intellect3": ("fp8", "fp8"),
    "rl_glm5": ("fp8", "fp8"),
    "rl_glm5_20": ("fp8", "fp8"),
    "rl_glm5_16": ("bf16", "fp8"),  # its masters are on the host, which FP8 in the trainer does not go with
    "sft_glm45_air": ("fp8", "bf16"),
    "sft_glm5": ("fp8", "bf16"),
}
"""Of trainer and engine; SFT has no engine. Small configurations are all bf16."""


@pytest.mark.parametrize("name", [p.stem for p in CONFIGS.glob("*.yaml")])
def test_a_configuration_computes_in_the_types_that_it_is_for(name: str) -> None:
    c = load(CONFIGS / f"{name}.yaml", planning=True)
    assert (c.trainer.precision, c.inference.precision) == PRECISION.get(name, ("bf16", "bf16"))
    assert c.model.dtype == "bfloat16"


def test_every_configuration_is_known_here() -> None:
    small = {"demo", "tiny", "multi_turn", "slurm_tiny"}
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == small | LARGE.keys()


@pytest.mark.parametrize("name", LARGE)
def test_a_large_configuration_fits_its_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, shape = LARGE[name]
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / ("GLM-5" if architecture is GLM_5 else "GLM-4.5-Air")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(architecture))
    characters("ab").save(folder)
    (tmp_path / "data").mkdir()
    for file in ("train", "validation"):
        (tmp_path / "data" / f"{file}.jsonl").touch()
    path = CONFIGS / f"{name}.yaml"
    if name.startswith("rl"):
        with pytest.raises(ConfigError) as error:
            load(path)
        assert [p.path for p in error.value.problems] == ["inference.engine"]
    config = load(path, [] if name.startswith("sft") else ["inference.engine=embedded"])
    spec = read_spec(folder)
    assert resolve(config.trainer, spec.n_experts) == shape
    (tmp_path / "stored.yaml").write_text(dump(config))
    assert load_resolved(tmp_path / "stored.yaml") == config
    assert yaml.safe_load(path.read_text())["run"]["name"] == name
