"""`python -m prl.score`: the logprob of every token, and the experts of every MoE layer, as the trainer or an engine has them.

The tool for hunting a mismatch: the same tokens through the trainer's packed forward and through the engine's cached one.

Legend: T tokens of a line, L MoE layers, K experts per token, A layers with an indexer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from prl.cli import exit_code
from prl.config.named import SetupError
from prl.config.schema import DType
from prl.models.spec import ModelSpec, read_spec
from prl.samples import first_fit_decreasing

if TYPE_CHECKING:
    from prl.models.base import Model

EngineName = Literal["trainer", "embedded"]
PACK_TOKENS = 8192
SELECTION_BYTES = 1 << 30
"""The indexer's selections are compared up to this size."""


class InputError(ValueError):
    """A line of the token file that cannot be scored: names file, line, what was expected and what was found."""


@dataclass(frozen=True)
class Scores:
    """Of one line: logprobs float32 [T], the first has none (0); row t of routes [T, L, K] and of selections
    [T, A, index_topk] is of the forward of token t, the one that scores token t + 1; None where the model has none."""

    logprobs: np.ndarray
    routes: np.ndarray | None
    selections: np.ndarray | None


def read_tokens(file: Path, spec: ModelSpec) -> list[np.ndarray]:
    """int32 [T] of every line of a JSONL file of {"tokens": [...]}. Raises InputError for the first line that is not that."""
    out = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            try:
                tokens = json.loads(line)["tokens"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f'{where}: expected {{"tokens": [...]}}, found {line.strip()[:80]!r}') from None
            if not isinstance(tokens, list) or not tokens or any(type(t) is not int for t in tokens):
                raise InputError(f"{where}: tokens: expected a list of at least one whole number, found {str(tokens)[:80]}")
            if bad := [t for t in tokens if not 0 <= t < spec.vocab_size]:
                raise InputError(f"{where}: tokens: {bad[0]} is outside of the vocabulary of {spec.vocab_size}")
            if len(tokens) > spec.max_positions:
                raise InputError(f"{where}: {len(tokens)} tokens, the model has {spec.max_positions} positions")
            out.append(np.array(tokens, np.int32))
    if not out:
        raise InputError(f'{file}: empty, expected lines of {{"tokens": [...]}}')
    return out


def score(
    model: Model,
    token_lists: Sequence[np.ndarray],
    engine: EngineName,
    *,
    selections: bool = False,
    chunk: int = 1,
    bitwise: bool = False,
) -> list[Scores]:
    """Every line's scores in float32; `chunk` is of the embedded engine: tokens per cached forward, 0 for as many as fit.

    With `bitwise` the model computes in the fixed order of `run.bitwise` from now on. SetupError where it cannot.
    """
    if bitwise:
        from prl.models.bitwise import fix_order

        fix_order(model, model.lm_head_weight.device)
    if engine == "trainer":
        return _score_trainer(model, token_lists, selections)
    return _score_embedded(model, token_lists, selections, chunk, bitwise)


def _score_trainer(model: Model, token_lists: Sequence[np.ndarray], selections: bool) -> list[Scores]:
    """The trainer's forward: lines packed end to end into rows of at most PACK_TOKENS."""
    import torch

    from prl.kernels.lm_head import IGNORE, logprobs
    from prl.layers.layout import PackedLayout
    from prl.models.base import ForwardInput

    out: dict[int, Scores] = {}
    for row in first_fit_decreasing([len(t) for t in token_lists], PACK_TOKENS):
        lengths = [len(token_lists[i]) for i in row]
        tokens = torch.from_numpy(np.concatenate([token_lists[i] for i in row])).long()
        positions = torch.cat([torch.arange(n) for n in lengths])
        layout = PackedLayout(lengths)
        with torch.inference_mode():
            forward = model(ForwardInput(tokens, positions, layout, record_selections=selections))
            labels = torch.where(positions.roll(-1) == 0, IGNORE, tokens.roll(-1))
            scored, _ = logprobs(forward.hidden_TD, model.lm_head_weight, labels, 1.0, chunk=1024)
        ends = np.cumsum(lengths)
        for i, n, end in zip(row, lengths, ends, strict=True):
            at = slice(end - n, end)
            out[i] = Scores(
                np.roll(scored[at].float().numpy(), 1),  # the last entry is 0, the first token has no logprob
                None if forward.routes_TLK is None else forward.routes_TLK[at].numpy(),
                None if forward.selections_TAS is None else forward.selections_TAS[at].numpy(),
            )
    return [out[i] for i in range(len(token_lists))]


def _score_embedded(
    model: Model, token_lists: Sequence[np.ndarray], selections: bool, chunk: int, bitwise: bool
) -> list[Scores]:
    """The embedded engine's forward: line by line, `chunk` tokens at a time on the cached keys of those before."""
    from prl.inference.engine import Engine

    block = 8
    slots = [-(-len(t) // block) * block for t in token_lists]
    engine = Engine(
        model,
        model.spec,
        max_batch=min(len(token_lists), 64),
        kv_tokens=max(max(slots), min(sum(slots), 65536)),
        block_size=block,
        record_selections=selections,
        selection_bytes=SELECTION_BYTES,
        bitwise=bitwise,
        name="embedded",
    )
    return [Scores(s.logprobs, s.routes, s.selections) for s in engine.score(token_lists, chunk=chunk)]


@dataclass(frozen=True)
class Difference:
    """How two engines' scores of the same lines differ; d = logprob of the first − logprob of the second."""

    tokens: int
    """Scored tokens; a line's first has no logprob."""
    max: float
    mean: float
    p50: float
    p99: float
    """Of |d|."""
    mismatch_kl: float
    """Mean of exp(d) − 1 − d."""
    pairs: int
    """(token, MoE layer) pairs."""
    other_experts: int
    """Pairs whose sets of experts differ."""
    selection_pairs: int
    """(token, indexed layer) pairs compared; 0 where there is no indexer or its selections were not recorded."""
    other_selections: int
    max_before_flip: float
    """max |d| over the tokens that no forward with other experts or selections came before in their line."""
    first_above: tuple[int, int] | None
    """(line, token), from 0, of the first token with |d| above the tolerance."""
    first_flip: tuple[int, int] | None
    """(line, token), from 0, of the first forward with other experts or selections."""


def compare(first: Sequence[Scores], second: Sequence[Scores], *, tolerance: float = 1e-4) -> Difference:
    """Of the same lines in the same order."""
    ds: list[np.ndarray] = []
    before: list[np.ndarray] = []
    pairs = other_experts = selection_pairs = other_selections = 0
    first_above = first_flip = None
    for line, (a, b) in enumerate(zip(first, second, strict=True)):
        n = len(a.logprobs)
        flipped = np.zeros(n, np.bool_)
        if a.routes is not None and b.routes is not None:
            other = (np.sort(a.routes, -1) != np.sort(b.routes, -1)).any(-1)
            pairs, other_experts = pairs + other.size, other_experts + int(other.sum())
            flipped |= other.any(-1)
        if a.selections is not None and b.selections is not None:
            other = (np.sort(a.selections, -1) != np.sort(b.selections, -1)).any(-1)
            selection_pairs, other_selections = selection_pairs + other.size, other_selections + int(other.sum())
            flipped |= other.any(-1)
        d = (a.logprobs.astype(np.float64) - b.logprobs.astype(np.float64))[1:]
        ds.append(d)
        flip = int(flipped.argmax()) if flipped.any() else n
        before.append(d[:flip])  # d[t] is of token t + 1, scored by forward t
        if first_flip is None and flip < n:
            first_flip = (line, flip)
        above = ~(np.abs(d) <= tolerance)  # so that NaN is above
        if first_above is None and above.any():
            first_above = (line, int(above.argmax()) + 1)
    d = np.concatenate(ds)
    size = np.abs(d) if len(d) else np.zeros(1)
    calm = np.abs(np.concatenate(before))
    return Difference(
        tokens=len(d),
        max=float(size.max()),
        mean=float(size.mean()),
        p50=float(np.quantile(size, 0.5)),
        p99=float(np.quantile(size, 0.99)),
        mismatch_kl=float(np.mean(np.expm1(d) - d)) if len(d) else 0.0,
        pairs=pairs,
        other_experts=other_experts,
        selection_pairs=selection_pairs,
        other_selections=other_selections,
        max_before_flip=float(calm.max()) if len(calm) else 0.0,
        first_above=first_above,
        first_flip=first_flip,
    )


def table(difference: Difference, first: str, second: str, *, tolerance: float) -> Table:
    def share(part: int, whole: int, none: str) -> str:
        return f"{part} of {whole} ({part / whole:.3%})" if whole else none

    def place(at: tuple[int, int] | None) -> str:
        return "none" if at is None else f"line {at[0] + 1}, token {at[1]}"

    d = difference
    out = Table(title=f"{first} − {second}", show_header=False)
    for name, value in (
        ("tokens", str(d.tokens)),
        ("max |d|", f"{d.max:.3g}"),
        ("mean |d|", f"{d.mean:.3g}"),
        ("p50 |d|", f"{d.p50:.3g}"),
        ("p99 |d|", f"{d.p99:.3g}"),
        ("mismatch KL, mean of exp(d) − 1 − d", f"{d.mismatch_kl:.3g}"),
        (f"first token with |d| > {tolerance:g}", place(d.first_above)),
        ("(token, layer) pairs with other experts", share(d.other_experts, d.pairs, "no experts")),
        ("(token, layer) pairs with other selections", share(d.other_selections, d.selection_pairs, "not recorded")),
        ("first forward with others", place(d.first_flip)),
        ("max |d| before each line's first", f"{d.max_before_flip:.3g}"),
    ):
        out.add_row(name, value)
    return out


def as_json(scores: Scores, *, routes: bool) -> str:
    """{"logprobs": [null, …], "routes": [T][layer][K]} on one line."""
    out: dict[str, object] = {"logprobs": [None, *(float(f"{x:.9g}") for x in scores.logprobs[1:])]}
    if routes:
        out["routes"] = None if scores.routes is None else scores.routes.tolist()
    return json.dumps(out)


HELP = """The logprob of every token under a model folder, as JSON lines on stdout, one for each input line.

{"tokens": [1, 2, 3]} in, {"logprobs": [null, -1.2, -0.3]} out; with --routes also "routes": the experts of every token in
every MoE layer, [token][layer][K], row t of the forward that scores token t + 1. No tokenizer file is needed. With --against
a table on stderr says how the two differ.

\b
Examples:
  python -m prl.score outputs/run/sft/model --tokens tokens.jsonl --routes > scores.jsonl
  python -m prl.score outputs/run/sft/model --tokens tokens.jsonl --against embedded
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    model_dir: Annotated[Path, typer.Argument(help="Hugging Face folder: config.json and safetensors.", metavar="MODEL_DIR")],
    tokens: Annotated[Path, typer.Option(help='JSON lines of {"tokens": [...]}.')],
    engine: Annotated[EngineName, typer.Option(help="Whose forward scores.")] = "trainer",
    routes: Annotated[bool, typer.Option("--routes", help="Add the experts of every token.")] = False,
    dtype: Annotated[DType, typer.Option(help="Type of the weights and of the forward.")] = "float32",
    against: Annotated[EngineName | None, typer.Option(help="Compare with this one, in a table on stderr.")] = None,
    chunk: Annotated[
        int, typer.Option(min=0, help="Embedded: tokens per cached forward; 1 as it decodes, 0 whole prompts.")
    ] = 1,
    bitwise: Annotated[bool, typer.Option("--bitwise", help="In the fixed order of run.bitwise.")] = False,
    tolerance: Annotated[float, typer.Option(min=0, help="The table names the first token that differs by more.")] = 1e-4,
) -> None:
    try:
        spec = read_spec(model_dir)
        token_lists = read_tokens(tokens, spec)
        import torch

        from prl.kernels import registry
        from prl.models.convert import WeightError
        from prl.models.hf import load_hf

        registry.backends()

        try:
            model = load_hf(model_dir, dtype=getattr(torch, dtype)).eval()
        except WeightError as e:
            raise InputError(str(e)) from None
    except (InputError, SetupError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    width = 4 * len(spec.indexed_layers) * spec.index_topk
    record = against is not None and 0 < width * sum(map(len, token_lists)) <= SELECTION_BYTES
    try:
        scores = score(model, token_lists, engine, selections=record, chunk=chunk, bitwise=bitwise)
    except SetupError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    for s in scores:
        print(as_json(s, routes=routes))
    if against is not None:
        other = score(model, token_lists, against, selections=record, chunk=chunk, bitwise=bitwise)
        difference = compare(scores, other, tolerance=tolerance)
        Console(stderr=True).print(table(difference, engine, against, tolerance=tolerance))


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a wrong command line, model folder or token file."""
    return exit_code(app, args, "python -m prl.score")


if __name__ == "__main__":
    sys.exit(main())
