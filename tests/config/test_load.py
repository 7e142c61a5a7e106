"""Configurations from files, bases and overrides: what is accepted, and that everything wrong is named at once."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prl.config.load import ConfigError, dump, load, load_resolved
from prl.config.schema import RunConfig

MODEL = "model: {architecture: {vocab_size: 64}}\ntokenizer: {characters: abc}\nenvs: [{name: words, kind: reasoning_gym}]\n"
# Those of large models: test_shipped.
CONFIGS = [Path("configs", f"{name}.yaml") for name in ("demo", "multi_turn", "slurm_tiny", "tiny")]


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Path → messages of every problem."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    found: dict[str, str] = {}
    for p in caught.value.problems:
        found[p.path] = f"{found[p.path]}; {p.message}" if p.path in found else p.message
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads_and_its_resolved_form_reproduces_it(path: Path, tmp_path: Path) -> None:
    config = load(path, ["run.seed=7", "trainer.optim.lr=1e-5"])
    assert (config.run.seed, config.trainer.optim.lr) == (7, 1e-5)
    stored = write(tmp_path, dump(config))
    assert load_resolved(stored) == config
    assert dump(load_resolved(stored)) == dump(config)


def test_bases_merge_deeply_and_lists_replace(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", MODEL + "trainer: {steps: 5, optim: {lr: 1, clip: 2}}", "lowest.yaml")
    write(tmp_path / "below", "base: lowest.yaml\ntrainer: {optim: {lr: 3}}", "base.yaml")
    config = load(write(tmp_path, "base: below/base.yaml\nenvs: [{name: sums, kind: calculator}]\ntrainer: {optim: {clip: 4}}"))
    assert (config.trainer.steps, config.trainer.optim.lr, config.trainer.optim.clip) == (5, 3.0, 4.0)
    assert [e.name for e in config.envs] == ["sums"]


def test_a_cycle_of_bases_is_named(tmp_path: Path) -> None:
    write(tmp_path, "base: b.yaml", "a.yaml")
    write(tmp_path, "base: a.yaml", "b.yaml")
    (message,) = [m for m in problems(tmp_path / "a.yaml").values() if "cycle" in m]
    assert message.index("a.yaml") < message.index("b.yaml") < message.rindex("a.yaml")


def test_overrides_are_yaml_and_reach_lists_and_missing_sections(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL)
    config = load(
        path,
        [
            "trainer.optim.lr=1e-5",
            "sft.steps=9",
            "envs.0.weight=2",
            "run.name='7'",
            "model.frozen=[a, b]",
            "launch.threads={trainer: 1}",
        ],
    )
    assert config.trainer.optim.lr == 1e-5 and config.sft is not None and config.sft.steps == 9
    assert config.envs[0].weight == 2 and config.envs[0].name == "words"
    assert config.run.name == "7" and config.model.frozen == ["a", "b"] and config.launch.threads == {"trainer": 1}
    assert load(path, ["sft.steps=9", "sft=null"]).sft is None


def test_a_mapping_as_override_merges(tmp_path: Path) -> None:
    config = load(write(tmp_path, MODEL + "trainer: {steps: 5, optim: {lr: 1}}"), ["trainer={optim: {clip: 3}}"])
    assert (config.trainer.steps, config.trainer.optim.lr, config.trainer.optim.clip) == (5, 1.0, 3.0)


def test_all_problems_come_in_one_report(tmp_path: Path) -> None:
    text = (
        MODEL
        + """\
optim: {lr: 1}
runn: {}
trainer:
  optm: {}
  steps: 1.5
  router_replay: yes
  steps: 3
  optim: {schedule: cosin, betas: [0.9]}
orchestrator: {batch_size: 20, group_size: 8}
sampling: {top_p: 0.9}
launch: {threads: {trainr: 2}}
"""
    )
    found = problems(
        write(tmp_path, text),
        "trainer.loss.kind=5",
        "envs.3.x=1",
        "nonsense",
        "run.name=a/b",
        "run.name.x=3",
        "run.dri=out",
        "run.seed=x",
    )
    assert found.keys() == {
        "optim", "runn", "trainer.optm", "trainer.steps", "trainer.router_replay", "trainer.optim.schedule",
        "trainer.optim.betas.1", "orchestrator.batch_size", "sampling.top_p", "launch.threads.trainr", "trainer.loss.kind",
        "envs.3.x", "nonsense", "run.name.x", "run.name", "run.dri", "run.seed",
    }  # fmt: skip
    assert "did you mean trainer.optim" in found["optim"]
    assert "did you mean run?" in found["runn"]
    assert "did you mean trainer.optim?" in found["trainer.optm"]
    assert "did you mean run.dir?" in found["run.dri"]
    assert "did you mean 'cosine'?" in found["trainer.optim.schedule"]
    assert "did you mean 'trainer'?" in found["launch.threads.trainr"]
    assert "true or false, got 'yes'" in found["trainer.router_replay"]
    assert "multiple of group_size = 8" in found["orchestrator.batch_size"]


def test_a_problem_says_where_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, MODEL + "trainer:\n  steps: -1\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\n\nsampling:\n  max_turns: none\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["run.seed=x", "sampling.tops.p=1"])
    origin = {p.path: p.origin for p in caught.value.problems}
    assert origin["trainer.steps"].endswith("base.yaml:5")
    assert origin["sampling.max_turns"].endswith("run.yaml:4")
    assert origin["run.seed"] == "run.seed=x"
    assert origin["sampling.tops"] == "sampling.tops.p=1"  # a section that the override made


def test_a_rule_stays_out_where_what_it_reads_is_not_sound(tmp_path: Path) -> None:
    """batch_size falls back to a default of which nothing is to be said; the lengths are sound and are spoken of."""
    text = MODEL + "orchestrator: {batch_size: many, group_size: 7}\nsampling: {max_length: 32, max_tokens: 64}"
    assert problems(write(tmp_path, text)).keys() == {"orchestrator.batch_size", "sampling.max_tokens"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"\xff\xfe\x00binary", "not a text file"),
        (b"a\x00b: 1", "not valid YAML"),
        (b"- 1\n- 2\n", "holds a list"),
        (b"trainer: {steps: 3", "not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"a: &x 1\nb: *x\n", "alias *x"),
        (b"a: " + b"[" * 1200, "nested too deeply"),
        (b"run: !!python/object/apply:os.system [ls]\n", "tag"),
        (b"trainer: {optim: {lr: 1e999}}", "not a finite float"),
        (b"run: {seed: " + b"9" * 5000 + b"}", "not a finite int"),
        (b"? [a, b]\n: 1\n", "a key must be a plain string"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert any(expected in m for m in problems(path).values())


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path, MODEL, "demo.yaml")
    assert "did you mean 'demo.yaml'" in next(iter(problems(tmp_path / "dmo.yaml", "run.seed=-1").values()))
    assert "Is a directory" in next(iter(problems(tmp_path).values()))
    alone = problems(write(tmp_path, "base: none.yaml\ntrainer: {steps: x}\n"), "envs.0.weight=2")
    assert alone.keys() == {f"{tmp_path / 'none.yaml'}", "trainer.steps"}  # what a base may hold is not called missing
    assert "no such file" in alone[f"{tmp_path / 'none.yaml'}"]
    nowhere = write(tmp_path, "model: {path: /nowhere}\nenvs: [{name: a, kind: b}]\n")
    assert problems(nowhere) == {"model.path": "/nowhere: no such file or folder"}
    assert problems(nowhere, f"model.path={tmp_path}") == {"model.path": f"{tmp_path}: no config.json in it"}


def test_a_path_is_stored_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "{}", "config.json")
    (tmp_path / "chat.jsonl").touch()
    path = write(tmp_path, "model: {path: model}\nsft: {data: [{path: chat.jsonl}], validation: [{path: chat.jsonl}]}\n")
    monkeypatch.chdir(tmp_path)
    assert problems(path, "sft.data.0.path=none") == {"sft.data.0.path": "none: no such file"}
    stored = write(tmp_path, dump(load(path)), "resolved.yaml")
    monkeypatch.chdir("/")
    resolved = load_resolved(stored)
    assert resolved.model.path == tmp_path / "model" and resolved.sft is not None
    assert [s.path for s in (*resolved.sft.data, *resolved.sft.validation)] == [tmp_path / "chat.jsonl"] * 2


def test_yaml_is_read_as_its_core_schema(tmp_path: Path) -> None:
    options = "{a: 1e-5, b: no, c: 2020-01-01, d: 0o7, e: 1_000, f: ~, g: 'true', h: .5, i: 12:30:00}"
    config = load(write(tmp_path, MODEL), [f"envs.0.options={options}"])
    expected = {
        "a": 1e-5,
        "b": "no",
        "c": "2020-01-01",
        "d": "0o7",
        "e": 1000,
        "f": None,
        "g": "true",
        "h": 0.5,
        "i": "12:30:00",
    }
    assert config.envs[0].options == expected
    assert load_resolved(write(tmp_path, dump(config))) == config


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain)
@example("a\x85\u2028b\u2029")
def test_whatever_an_option_holds_survives_the_stored_file(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    config = RunConfig.model_validate(
        {"model": {"architecture": {"x": value}}, "tokenizer": {"characters": "a"}, "envs": [{"name": "a", "kind": "b"}]}
    )
    path = tmp_path_factory.getbasetemp() / "stored.yaml"
    path.write_text(dump(config), encoding="utf-8", errors="surrogatepass")
    assert load_resolved(path) == config


names = st.sampled_from(
    ["base", "run", "trainer", "optim", "lr", "steps", "envs", "name", "kind", "model", "0", "", "sft", "<<", "a.b"]
)
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def loads_or_reports(path: Path, *overrides: str) -> None:
    try:
        load(path, overrides)
    except ConfigError as error:
        assert error.problems and all(p.path and p.message for p in error.problems)
        assert str(error).startswith(str(path))


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace")),
    st.lists(st.text(max_size=12), max_size=2),
)
@example(b"a: 1", [""])
@example(b"{'': 1, '': 2}", [])
def test_any_bytes_load_or_are_reported(tmp_path_factory: pytest.TempPathFactory, content: bytes, overrides: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    loads_or_reports(path, *overrides)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, nested, max_size=4), st.lists(st.tuples(st.lists(names, max_size=4), nested), max_size=3))
def test_any_tree_loads_or_is_reported(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object], overrides: list[tuple[list[str], object]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loads_or_reports(path, *(f"{'.'.join(keys)}={yaml.safe_dump(value, default_flow_style=True)}" for keys, value in overrides))


def test_the_configuration_imports_no_torch() -> None:
    code = "import sys, prl.config.load, prl.config.rules; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
