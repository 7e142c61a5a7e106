"""The generated part of docs/plan.md: `python -m prl.plan.page docs/plan.md` writes it anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prl.config.load import load
from prl.models.spec import read_spec
from prl.plan.hardware import find
from prl.plan.plan import Plan, make
from prl.plan.show import lines, seconds

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = (("rl_glm5_16", 16), ("rl_glm5_20", 20), ("rl_glm5", 28), ("rl_glm45_air", 4), ("rl_intellect3", 60))
"""(configuration, nodes)."""
BEGIN, END = "<!-- generated: python -m prl.plan.page docs/plan.md -->", "<!-- end -->"
GOAL_S = 3.5 * 60


def of(name: str, nodes: int, length: int | None = None, *, search: bool = True) -> Plan:
    config = load(CONFIGS / f"{name}.yaml", planning=True)
    spec = read_spec(config.model.path or {})
    return make(spec, config, find("H200"), nodes=nodes, length=length, search=search)


def longest(name: str, nodes: int, figure: Callable[[Plan], float], goal_s: float) -> int:
    """Mean tokens of a rollout at which `figure` still keeps the goal; 0 where none does."""
    top = load(CONFIGS / f"{name}.yaml", planning=True).sampling.max_length
    low, high = (top, top) if figure(of(name, nodes, top, search=False)) <= goal_s else (0, top)
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (middle, high) if figure(of(name, nodes, middle, search=False)) <= goal_s else (low, middle)
    return low


def generated() -> Iterator[str]:
    for name, nodes in LARGE:
        yield f"### configs/{name}.yaml on {nodes} nodes of 8 H200\n"
        yield "```"
        yield from lines(of(name, nodes))
        yield "```\n"
    yield "### A step of 3.5 minutes of GLM-5 on 28 nodes\n"

    def trainer(p: Plan) -> float:
        return p.asked.times.serial

    def hidden(p: Plan) -> float:
        return p.asked.times.floor

    def generate(p: Plan) -> float:
        return p.rollouts.seconds

    whole = of("rl_glm5", 28, search=False)
    tokens = {k: longest("rl_glm5", 28, f, GOAL_S) for k, f in (("t", trainer), ("h", hidden), ("r", generate))}
    yield (
        f"* The trainer keeps it up to {tokens['t']:,} tokens a rollout on average with no traffic hidden, {tokens['h']:,} "
        f"with all of it hidden; at {whole.batch.length:,} it takes {seconds(trainer(whole))} and {seconds(hidden(whole))}."
    )
    yield (
        f"* The engines keep it up to {tokens['r']:,} tokens a rollout, half of them sampled; they are bound by "
        f"{of('rl_glm5', 28, max(tokens['r'], 1), search=False).rollouts.bound}."
    )
    published = {"3.7 minutes of the trainer": (trainer, 222.0), "5.0 minutes of rollouts": (generate, 300.0)}
    for what, (figure, goal) in published.items():
        yield f"* The published {what} would come out at {longest('rl_glm5', 28, figure, goal):,} tokens a rollout."


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([BEGIN, "", *generated(), "", END]) + after


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
