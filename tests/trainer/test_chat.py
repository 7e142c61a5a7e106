"""Chat data: what is trained, what happens to conversations that do not fit, what is said of wrong ones."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.orchestrator import sft as roles
from prl.samples import Sample
from prl.tokenizer import Tokenizer, characters, load
from prl.trainer.chat import ChatError, Conversations
from tests.trainer.helpers import config, run_dir

ALPHABET = "abcdefghijklmnopqrstuvwxyz<>|/ 0123456789"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
FORGETFUL = (  # an earlier assistant's thoughts are stripped, as GLM's and Qwen's templates do
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('/')[-1] }}|"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = PLAIN) -> Tokenizer:
    made = characters(ALPHABET)
    made.chat_template = template
    return made


def say(*turns: str) -> dict[str, Any]:
    """u: a user's, a: the assistant's, s: the system's, t: a tool's."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return {"messages": [{"role": names[turn[0]], "content": turn[1:]} for turn in turns]}


def conversations(path: Path, records: Sequence[Any], template: str | None = PLAIN, **options: Any) -> Conversations:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    given: dict[str, Any] = {"roles": ["assistant"], "max_length": 1000, "too_long": "drop"}
    return Conversations(path, tokenizer(template), **(given | options))


def shown(sample: Sample) -> str:
    """The text with what is trained in capitals."""
    letters = (tokenizer().decode([i]) for i in sample.tokens)
    return "".join(c.upper() if trained else c for c, trained in zip(letters, sample.trainable, strict=True))


def test_the_assistants_messages_are_trained_and_its_role_is_prompt(tmp_path: Path) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("sbe kind", "uhi", "ahello", "ubye", "aciao")])
    assert [shown(s) for s in file[0]] == ["<system>be kind|<user>hi|<assistant>HELLO|<user>bye|<assistant>CIAO|"]
    lower = "".join(c for c in shown(file[0][0]) if c.islower())
    assert "HELLO" in shown(file[0][0]) and "assistant" in lower


def test_other_roles_can_be_trained(tmp_path: Path) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahello", "tfound")], roles=["user", "tool"])
    assert [shown(s) for s in file[0]] == ["<USER>HI|<assistant>hello|<TOOL>FOUND|"], "but for a first token"


def test_a_past_that_the_template_rewrites_makes_another_sample(tmp_path: Path) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahm/hello", "ubye", "aoh/ciao")], FORGETFUL)
    assert [shown(s) for s in file[0]] == [
        "<user>hi|<assistant>HM/HELLO|",
        "<user>hi|<assistant>hello|<user>bye|<assistant>OH/CIAO|",
    ]


def test_long_ones_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    records = [say("uhi", "ahello"), say("uhi", "a" + "x" * 40), say("u" + "y" * 40, "ahello"), say("uhi")]
    dropping = conversations(tmp_path / "a.jsonl", records, max_length=30)
    assert [len(dropping[i]) for i in range(4)] == [1, 0, 0, 0]
    assert dropping.counts == {"dropped": 2, "untrained": 1}
    cutting = conversations(tmp_path / "b.jsonl", records, max_length=30, too_long="cut")
    assert [[len(s) for s in cutting[i]] for i in range(3)] == [[26], [30], []], "nothing trained is left of the third"
    assert cutting.counts == {"cut": 2}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ('{"messages": [', "conversation 2 .*not JSON"),
        ('{"text": "hi"}', 'conversation 2 .*expected {"messages"'),
        ({"messages": [{"content": "hi"}]}, "message 1: expected an object with role and content"),
        (say("uHI", "ahello"), r"c\.jsonl, conversation 2 \(byte \d+\): message 2 \(assistant\): .*no token for 'HI'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, record: Any, expected: str) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahello"), record])
    assert file[0]
    with pytest.raises(ChatError, match=expected):
        file[1]


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ '{} {}'.format('a') }}", "IndexError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(1000000) %}x{% endfor %}", "OverflowError"),
        ("{{ messages + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_in_whatever_way_is_named(tmp_path: Path, template: str, error: str) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahello")], template)
    with pytest.raises(ChatError, match=rf"c\.jsonl, conversation 1 \(byte 0\): the chat template refuses it: {error}: "):
        file[0]


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahello")])
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(ChatError, match=r"c\.jsonl: cannot be read"):
        file[0]


def test_answers_that_the_template_shows_nothing_of_are_counted(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "a"), say("u", "a"), say("uhi", "ahello")], bare)
    assert [[shown(s) for s in file[i]] for i in range(3)] == [[], [], ["hiHELLO"]]
    assert file.counts == {"untrained": 2}


def test_a_template_that_refuses_or_contradicts_itself_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="no chat template"):
        conversations(tmp_path / "a.jsonl", [say("uhi")], None)
    refuses = conversations(tmp_path / "b.jsonl", [say("uhi", "ahello")], "{{ raise_exception('no systems') }}")
    with pytest.raises(ChatError, match="refuses it: no systems"):
        refuses[0]
    contradicts = PLAIN.replace("{% if add_generation_prompt %}<assistant>", "{% if add_generation_prompt %}<bot>")
    with pytest.raises(ChatError, match="does not go on from its own prompt"):
        conversations(tmp_path / "c.jsonl", [say("uhi", "ahello")], contradicts)[0]
    with pytest.raises(ChatError, match="no conversations"):
        conversations(tmp_path / "d.jsonl", [""])
    with pytest.raises(ChatError, match="cannot be read"):
        Conversations(tmp_path / "absent.jsonl", tokenizer(), roles=["assistant"], max_length=9, too_long="drop")


@pytest.mark.parametrize("named", [False, True])
def test_the_template_travels_with_the_tokenizer(tmp_path: Path, named: bool) -> None:
    made = tokenizer()
    made.save(tmp_path)
    if named:  # as older models have it
        (tmp_path / "chat_template.jinja").unlink()
        file = tmp_path / "tokenizer_config.json"
        templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": PLAIN}]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
    assert load(tmp_path).chat_template == PLAIN


def sft_config(folder: Path, **sft: Any) -> RunConfig:
    tokenizer().save(folder / "tokenizer")
    files = []
    for name, letters in (("a", "abcdefgh"), ("b", "ijklmnop")):
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(say(f"u{c}", f"a{c}{c}")) for c in letters))
        files.append({"path": str(file), "weight": 1.0 + (name == "a")})
    c = config("float32").model_dump()
    c["model"]["architecture"] = c["model"]["architecture"] | {"vocab_size": 48}
    c["tokenizer"] = {"path": str(folder / "tokenizer")}
    c["sft"] = {"steps": 6, "batch_size": 4, "data": files, "validation": files[1:], "validate_every": 3, "optim": {"lr": 1e-2}}
    return RunConfig.model_validate(c | {"sft": c["sft"] | sft, "checkpoint": {"every": 2}})


def test_it_learns_from_files_validates_and_resumes_its_data(tmp_path: Path) -> None:
    def records(root: Path, kind: str) -> list[dict[str, Any]]:
        lines = (root / "metrics.jsonl").read_bytes().splitlines()
        return [r for r in map(orjson.loads, lines) if r["kind"] == kind]

    c = sft_config(tmp_path, steps=12)
    whole = run_dir(tmp_path / "whole")
    assert roles.main(whole, c, 0, threading.Event()) == 0
    losses = [r["loss"] for r in records(whole.root, "step")]
    validated = records(whole.root, "eval")
    assert [(v["split"], v["step"]) for v in validated] == [("validation", n) for n in (3, 6, 9, 12)]
    assert validated[-1]["loss"] < validated[0]["loss"] < losses[0] and validated[0]["tokens"] == 8 * 3
    assert load(whole / "sft" / "model").chat_template == PLAIN

    halved = run_dir(tmp_path / "halved")
    stop = threading.Event()
    seen: list[int] = []

    class Stop(threading.Event):
        def is_set(self) -> bool:
            seen.append(0)
            return len(seen) > 5 or stop.is_set()

    assert roles.main(halved, c, 0, Stop()) == 75
    assert roles.main(halved, c, 0, threading.Event()) == 0
    assert [r["loss"] for r in records(halved.root, "step")] == losses, "as if it had never stopped"


def test_nothing_left_to_train_on_is_an_error_after_an_epoch(tmp_path: Path) -> None:
    c = sft_config(tmp_path, max_length=10)  # 16 conversations, four a step
    run = run_dir(tmp_path / "run")
    with pytest.raises(SetupError, match=r"the last 16 examples none is left to train on \(dropped 16\); see"):
        roles.main(run, c, 0, threading.Event())
    lines = map(orjson.loads, (run / "metrics.jsonl").read_bytes().splitlines())
    assert [r["left_out"] for r in lines if r["kind"] == "step"] == [{"dropped": n} for n in (4, 8, 12)]


def test_a_resume_amid_other_data_is_refused(tmp_path: Path) -> None:
    """Its position would stand for other examples: some would come twice and others never."""
    c, run = sft_config(tmp_path), run_dir(tmp_path / "run")

    class Stop(threading.Event):
        left = 3

        def is_set(self) -> bool:
            self.left -= 1
            return self.left < 0

    assert roles.main(run, c, 0, Stop()) == 75
    path = c.sft.data[0].path if c.sft else Path()
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for changed in (before + lines[0], b"".join(reversed(lines)), before[:-1] + b" \n"):
        path.write_bytes(changed)
        assert roles.main(run, c, 0, threading.Event()) == 1
        text = errors(run.root)[-1]
        assert re.search(rf"step_\d: saved amid other data than {path}, .*restore it, or .*\n  source 1: .* here, ", text)
    path.write_bytes(before)
    other = c.model_copy(update={"sft": c.sft.model_copy(update={"batch_size": 5})}) if c.sft else c
    assert roles.main(run, other, 0, threading.Event()) == 1
    assert "batch_size: 5 here, 4 in the checkpoint" in errors(run.root)[-1]
    assert roles.main(run, c, 0, threading.Event()) == 0


def errors(root: Path) -> list[str]:
    lines = (root / "metrics.jsonl").read_bytes().splitlines()
    return [r["error"] for r in map(orjson.loads, lines) if r["kind"] == "event" and r["name"] == "failed"]


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = conversations(tmp_path / "c.jsonl", [say("uhi", "ahello"), say("ubye", "aciao")])
    file[0]
    file.path.write_text(file.path.read_text().replace("ciao", "oaic").replace("hi", "hey"))
    with pytest.raises(ChatError, match=r"c\.jsonl: changed since this training began to read it"):
        file[1]
