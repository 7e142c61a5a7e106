"""report.html: all parts of a whole run, whatever parts of a shorter one, nothing from outside and no foreign markup."""

import re
from html.parser import HTMLParser
from pathlib import Path

import orjson
import plotly.graph_objects as go
import pytest

from prl.bench.rows import Goal, Result, Row, publish
from prl.monitor.history import load_history
from prl.monitor.report import CARDS, expert_load, learning, staleness, timeline, write_report
from prl.report import main
from tests.monitor.synthetic import records, write_run


class Tags(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in not in ("script", "style"):
            self.text += data


def page(path: Path) -> Tags:
    return Tags(path.read_text(encoding="utf-8"))


def test_a_whole_run_has_every_part(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records(40))
    html = write_report(run).read_text()
    tags = Tags(html)
    ids = {a.get("id") for _, a in tags.tags}
    assert {f"figure-{card.name}" for card in CARDS} | {"samples"} <= ids
    assert html.count("plotly.js v") == 1
    for text in ("0.120", "0.690", "+0.570", "0.410", "step 1", "step 40", "max_staleness: 2", "Who waited for whom"):
        assert text in tags.text


def test_the_page_loads_nothing_from_outside(tmp_path: Path) -> None:
    tags = page(write_report(write_run(tmp_path / "run", records(10))))
    assert not [(t, a) for t, a in tags.tags if t in ("link", "img", "iframe") or a.get("src") or a.get("href")]


def test_figures_are_valid_to_plotly(tmp_path: Path) -> None:
    history = load_history(write_run(tmp_path / "run", records(40)))
    for card in CARDS:
        go.Figure(card.make(history))


def test_figures_hold_the_records(tmp_path: Path) -> None:
    made = records(40)
    history = load_history(write_run(tmp_path / "run", made))
    curves = {d["name"]: d for d in learning(history)["data"]}  # type: ignore[index]
    assert curves["held out, temperature 1"]["y"][0] == 0.12 and len(curves["reward of the batch"]["y"]) == 40
    assert curves["control (more SFT), temperature 1"]["y"] == [0.12, 0.41]
    counts = [r["staleness"] for r in made if r["role"] == "orchestrator" and r["kind"] == "step"]
    total = sum(sum(c.values()) for c in counts)
    shares = [sum(c[str(i)] for c in counts) / total for i in range(3)]
    assert staleness(history)["data"][0]["y"] == pytest.approx(shares)  # type: ignore[index]
    load = expert_load(history)
    assert load is not None and (len(load), len(load[0])) == (3, 16)
    assert all(sum(row) / 16 == pytest.approx(1) for row in load)
    bars = {d["name"]: d for d in timeline(history)["data"]}  # type: ignore[index]
    trained = [r for r in made if r["kind"] == "span" and r["name"] == "train"]
    assert bars["train"]["x"] == pytest.approx([r["t1"] - r["t0"] for r in trained]) and set(bars["train"]["y"]) == {"trainer"}


def test_what_a_model_or_a_user_wrote_is_text(tmp_path: Path) -> None:
    evil = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>"
    made = records(3)
    for r in made:
        if r["kind"] == "sample":
            r |= {"prompt": evil, "completion": evil}
        if r["kind"] == "span" and "what" in r:
            r["what"] = evil
    made.append({"t": made[-1]["t"], "role": evil, "kind": "event", "name": evil, "detail": evil})
    tags = page(write_report(write_run(tmp_path / "run", made, f"envs.0.name='{evil}'")))
    assert not [t for t, _ in tags.tags if t == "img"] and not any("onerror" in a for _, a in tags.tags)
    plain = page(write_report(write_run(tmp_path / "plain", records(3))))
    scripts = [t for t, _ in tags.tags].count("script")
    assert scripts == [t for t, _ in plain.tags].count("script")
    assert tags.text.count("alert(2)") >= 6


@pytest.mark.parametrize("kind", ["step", "eval", "span", "sample", "engine"])
def test_missing_parts_leave_gaps_and_no_errors(tmp_path: Path, kind: str) -> None:
    assert (
        "Configuration"
        in page(write_report(write_run(tmp_path / "without", [r for r in records(5) if r["kind"] != kind]))).text
    )
    assert (
        "Configuration" in page(write_report(write_run(tmp_path / "only", [r for r in records(5) if r["kind"] == kind]))).text
    )


def test_an_empty_run_and_a_torn_last_line(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", [])
    (empty.root / "metrics.jsonl").unlink()
    assert not re.search("figure-", write_report(empty).read_text())
    torn = write_run(tmp_path / "torn", records(5))
    with (torn.root / "metrics.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "kind": "st')
    assert "figure-learning" in write_report(torn).read_text()


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", records(5))
    assert main([str(run.root)]) == 0
    assert (run.root / "report.html").stat().st_size > 1_000_000 and (run.root / "summary.json").exists()
    assert "solve rate after SFT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("control", "class_", "text"),
    [
        (0.41, "good", "RL ended above the control: 0.690 against 0.410 on held-out tasks (+0.280)."),
        (0.9, "bad", "RL ended below the control: 0.690 against 0.900 on held-out tasks (-0.210)."),
    ],
)
def test_it_says_whether_rl_ended_above_the_control(tmp_path: Path, control: float, class_: str, text: str) -> None:
    made = records(40)
    for r in made:
        if r["kind"] == "eval" and r.get("sampled") == 0.41:
            r["sampled"] = control
    tags = page(write_report(write_run(tmp_path / "run", made, "control.time_fraction=0.5")))
    assert f"{text} The control had 50% of RL's time." in tags.text and ("p", {"id": "verdict", "class": class_}) in tags.tags
    without = [r for r in made if not (r["kind"] == "eval" and r.get("sampled") == control)]
    assert "the control: " not in page(write_report(write_run(tmp_path / "without", without))).text


def test_measurements_are_shown_where_a_file_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", records(5))
    rows = [
        Row("asynchronous: steps", 2.5, "per s", None, 1.43, "synchronous", Goal(least=1.3)),
        Row("steps <b>of another</b>", None, "per s", goal=Goal(least=9.0)),
    ]
    file = tmp_path / "pipeline.json"
    assert publish(Result("pipeline", rows, {"cpu": "a <i>cpu"}, {}), str(file)) == 1
    assert main([str(run.root), "--measurements", str(file)]) == 0
    tags = page(run.root / "report.html")
    for text in ("2.5 per s", "1.43 × synchronous", ">= 1.3: met", "steps <b>of another</b>", ">= 9: missed", "a <i>cpu"):
        assert text in tags.text
    assert {("td", "good"), ("td", "bad")} <= {(t, a.get("class")) for t, a in tags.tags}
    assert main([str(run.root)]) == 0
    assert "asynchronous: steps" not in page(run.root / "report.html").text
    for wrong in ("[]", '{"rows": [{"name": "x"}]}', "{"):
        file.write_text(wrong)
        assert main([str(run.root), "--measurements", str(file)]) == 2
        assert f"{file}: not the result of a bench" in capsys.readouterr().err
    assert main([str(run.root), "--measurements", str(tmp_path / "none.json")]) == 2


def test_an_audit_under_a_damaged_configuration_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{")
    assert main([str(tmp_path), "--audit"]) == 2
    assert "not valid YAML" in capsys.readouterr().err


def test_records_of_another_schema_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = records(5)
    wrong = [{**r, "loss": "low", "t": r["t"]} for r in made if r["kind"] == "step" and r["role"] == "trainer"]
    run = write_run(tmp_path / "run", made)
    with (run.root / "metrics.jsonl").open("ab") as file:
        file.writelines(orjson.dumps({**r, "step": 6}) + b"\n" for r in wrong)
        file.write(b"[]\n")
    assert main([str(run.root)]) == 0
    summary = orjson.loads((run.root / "summary.json").read_bytes())
    assert summary["steps"] == 5 and summary["records_left_out"] == 6
    assert summary["records_left_out_by"]["trainer step: Expected `float | null`, got `str` - at `$.loss`"] == 5
    assert "records left out" in capsys.readouterr().out


def test_a_damaged_ledger_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", records(5))
    with (run.root / "ledger.jsonl").open("ab") as file:
        file.write(orjson.dumps({"kind": "step", "step": "6", "rollouts": []}) + b"\n")
    assert main([str(run.root)]) == 1
    assert "ledger.jsonl: damaged: entry of step 6: Expected `int`, got `str`" in capsys.readouterr().err


def test_the_command_names_a_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no config.yaml in it" in capsys.readouterr().err
