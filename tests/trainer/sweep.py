"""Cases in which settings that must not matter meet: every two of them, and every mesh, optimizer and dispatcher."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

from tests.trainer.invariance import Case

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "alone": (1, {}),
    "2: dp": (2, {"ep": 1}),
    "2: ep": (2, {"ep": 2}),
    "2: cp": (2, {"cp": 2, "ep": 1}),
    "2: ep×cp": (2, {"cp": 2, "ep": 2}),
    "2: replicate": (2, {"replicate": 2, "ep": 1}),
    "4: dp": (4, {"ep": 1}),
    "4: dp×ep": (4, {"ep": 2}),
    "4: ep": (4, {"ep": 4}),
    "4: dp×cp": (4, {"cp": 2, "ep": 1}),
    "4: dp×ep×cp": (4, {"cp": 2, "ep": 2}),
    "4: ep×cp": (4, {"cp": 2, "ep": 4}),
    "4: replicate×shard": (4, {"replicate": 2, "ep": 1}),
    "4: replicate×ep": (4, {"replicate": 2, "ep": 2}),
    "8: dp": (8, {"ep": 1}),
    "8: dp×ep": (8, {"ep": 4}),
    "8: ep": (8, {"ep": 8}),
    "8: dp×cp": (8, {"cp": 2, "ep": 1}),
    "8: dp×ep×cp": (8, {"cp": 2, "ep": 2}),
    "8: dp×ep×cp, wide": (8, {"cp": 4, "ep": 4}),
    "8: replicate×shard": (8, {"replicate": 2, "ep": 1}),
    "8: replicate×shard×ep": (8, {"replicate": 2, "ep": 2}),
    "8: replicate×shard×ep×cp": (8, {"replicate": 2, "cp": 2, "ep": 2}),
}
FACTORS: list[list[Any]] = [
    list(MESHES),
    [{"kind": "sgd"}, {"kind": "adamw", "eps": 1e-6}, {"kind": "muon", "eps": 1e-6, "weight_decay": 0.1}],
    ["all_to_all", "deepep"],
    [1, 3],  # chunks of a dispatch
    ["random", "crowd", "shun", "pair", "idle"],  # the routes, or fewer documents than ranks
    [64, 28],  # pack_tokens
    [1e9, 0.05],  # clip
    ["none", "full", "selective"],  # recompute
    [0, 1],  # offload_activations
    ["none", "optimizer", "parameters"],  # offload
    [[], [".*"]],  # keep_gathered
]


def cover(sizes: list[int], together: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Few rows of levels, in which all levels of each group of factors in `together` meet. Greedy, always the same."""
    open_ = {(group, levels): None for group in together for levels in product(*(range(sizes[f]) for f in group))}
    rows = []
    while open_:
        group, levels = next(iter(open_))
        row = dict(zip(group, levels, strict=True))
        for factor in sorted(set(range(len(sizes))) - set(group)):
            known = [g for g in together if factor in g and all(f == factor or f in row for f in g)]

            def gain(level: int, row: dict[int, int] = row, factor: int = factor, known: list[Any] = known) -> int:
                return sum((g, tuple((row | {factor: level})[f] for f in g)) in open_ for g in known)

            start = len(rows) % sizes[factor]  # equally good ones take turns
            row[factor] = max(((start + n) % sizes[factor] for n in range(sizes[factor])), key=gain)
        rows.append(tuple(row[f] for f in range(len(sizes))))
        for g in together:
            open_.pop((g, tuple(row[f] for f in g)), None)
    return rows


def sweep() -> dict[str, Case]:
    together = [(0, 1, 2), *combinations(range(len(FACTORS)), 2)]
    out = {}
    for row in cover([len(levels) for levels in FACTORS], together):
        mesh, optim, dispatcher, chunks, work, pack_tokens, clip, recompute, activations, offload, gathered = (
            levels[i] for levels, i in zip(FACTORS, row, strict=True)
        )
        ranks, sizes = MESHES[mesh]
        case = Case(
            ranks,
            sizes | {"dispatcher": dispatcher, "dispatch_chunks": chunks},
            {"recompute": recompute, "offload_activations": activations, "offload": offload, "keep_gathered": gathered},
            optim=optim,
            clip=clip,
            pack_tokens=pack_tokens,
        )
        named = [mesh, optim["kind"], f"{dispatcher} × {chunks}", work]
        named += ["unpacked"] * (pack_tokens < Case.pack_tokens) + ["clipped"] * (clip < Case.clip)
        named += [f"recompute {recompute}"] + ["activations off"] * activations + [f"offload {offload}"]
        out[", ".join(named + ["kept"] * len(gathered))] = (
            replace(case, rollouts=2) if work == "idle" else replace(case, routes=work)
        )
    return out
