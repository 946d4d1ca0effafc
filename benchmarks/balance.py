"""How evenly Muon's matrices are shared out over data-parallel ranks, for the shapes of published models.

    python benchmarks/balance.py [--models Llama] [--ranks 8 64 512]

Pure arithmetic: no tensor is made. Beside the plan over the whole model stands what planning bucket by bucket gives:
cost-aware, loads carried from bucket to bucket, and every shard of a bucket padded to the largest. Its buckets are
closed at as many elements as give every rank the largest matrix; with smaller ones most ranks get nothing of a bucket.

Lower bounds over all plans (`balance_bounds.py`) tell how much better any could be: the least time of a step, the same
for plans that keep bytes of state within 1.1 of their mean, and the least operations of the rank with the most, over
the mean of the plan.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from balance_bounds import Bounds
from balance_models import MODELS, REST
from harness import write_result
from megaopt_layerwise.buffers import lay_out_segments
from megaopt_layerwise.planner import CostModel, Division, OwnerPlan, OwnerPolicy, Work, plan_owners, work_of

from megaopt_core import get_registry
from megaopt_core.params import Granularity, MatrixView, ParamSpec

RANKS = (8, 16, 32, 64, 128, 256, 512)
GOAL = 1.05
"""Largest operations of a rank over their mean that a plan should keep to, unless every such plan is slower."""
MOST_MEMORY = 1.1
"""The same for bytes of state."""
ADAM_BYTES = 12.0
"""Of an element that Adam steps: main value and two moments."""
FORMS = {"matrices": False, "batches": True}
"""How experts are stored, to whether they lie in batches."""


def specs_of(model: str, *, batched: bool) -> list[ParamSpec]:
    """Return the matrices of a model as Muon is given them.

    Args:
        model: its name in `MODELS`.
        batched: the experts of a layer are one parameter.
    """
    step_cost = get_registry().optimizer("muon").step_cost
    specs = []
    for name, shape in MODELS[model](batched):
        view = MatrixView(batch_dims=len(shape) - 2)
        spec = ParamSpec(
            name,
            shape,
            torch.bfloat16,
            torch.float32,
            "muon",
            0,
            Granularity.TENSOR,
            0.0,
            view=view,
            takes_peers=True,
        )
        specs.append(evolve(spec, cost=step_cost(spec, view)))
    return specs


def plan_by_bucket(works: Sequence[Work], ranks: int) -> tuple[OwnerPlan, float]:
    """Return the plan bucket by bucket, and the padding of equal shards as a fraction of all elements.

    Args:
        works: in model order.
        ranks: how many there are.
    """
    size = ranks * max(work.numel for work in works)
    bucket = numel = 0
    placed = []
    for work in reversed(works):
        placed.append(evolve(work, bucket=bucket))
        numel += work.numel
        if numel >= size:
            bucket, numel = bucket + 1, 0
    plan = plan_owners(placed, ranks, policy=OwnerPolicy.BUCKET)
    shards: dict[int, list[int]] = {}
    for work in placed:
        shard = shards.setdefault(work.bucket, [0] * ranks)
        shard[plan.owners[work.name].ranks[0]] += work.numel
    padded = sum(ranks * max(shard) for shard in shards.values())
    return plan, padded / sum(work.numel for work in works) - 1


def padding_of(specs: Sequence[ParamSpec], plan: OwnerPlan, ranks: int) -> float:
    """Return the padding of one buffer with a plan's owners, as a fraction of all elements.

    Args:
        specs: what was shared out.
        plan: who owns it.
        ranks: how many there are.
    """
    numel = sum(spec.numel for spec in specs)
    return (lay_out_segments([specs], plan.owners, ranks).numel - numel) / numel


def figures(model: str, form: str, ranks: int) -> dict[str, Any]:
    """Return what one plan costs, beside that of whole owners and that by bucket.

    Args:
        model: its name in `MODELS`.
        form: how experts are stored.
        ranks: how many there are.
    """
    specs = specs_of(model, batched=FORMS[form])
    works = [work_of(spec) for spec in specs]
    by_bucket, bucket_padding = plan_by_bucket(works, ranks)
    whole = plan_owners(works, ranks)
    begun = time.process_time()
    plan = plan_owners(works, ranks, divisions=list(Division))
    seconds = time.process_time() - begun
    bounds = Bounds(works, ranks, CostModel())
    largest = max(work.cost for work in works) * ranks / sum(work.cost for work in works)
    return {
        "model": model,
        "experts": form,
        "ranks": ranks,
        "largest_over_mean": round(largest, 3),
        "by_bucket": {**_balance(by_bucket), "padding": round(bucket_padding, 4)},
        "whole": {**_balance(whole), "padding": round(padding_of(specs, whole, ranks), 4)},
        "plan": {**_balance(plan), "padding": round(padding_of(specs, plan, ranks), 4)},
        "divided": {str(division): count for division, count in plan.counts().items() if count},
        "most_peers": max(
            (len(owners.ranks) for owners in plan.owners.values() if owners.division is Division.PEERS),
            default=1,
        ),
        "least": {
            "step_ms": round(1e3 * bounds.step_seconds(), 3),
            "step_ms_with_level_state": round(1e3 * bounds.step_seconds(MOST_MEMORY), 3),
            "compute": round(bounds.operations() * ranks / sum(plan.costs), 4),
        },
        "planning_seconds": round(seconds, 2),
    }


def with_the_rest(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the balance of all state: with equal shares of Adam's, and with those laid on the emptiest ranks.

    Args:
        row: what :func:`figures` returned.
    """
    specs = specs_of(row["model"], batched=FORMS[row["experts"]])
    mean = sum(work_of(spec).state_bytes for spec in specs) / row["ranks"]
    rest, fullest = ADAM_BYTES * REST[row["model"]] / row["ranks"], row["plan"]["state_bytes"] * mean
    return {
        "in_equal_shares": round((fullest + rest) / (mean + rest), 4),
        "on_the_emptiest": round(max(fullest, mean + rest) / (mean + rest), 4),
    }


def _balance(plan: OwnerPlan) -> dict[str, float]:
    return {
        "compute": round(plan.compute_imbalance, 4),
        "state_bytes": round(plan.memory_imbalance, 4),
        "step_ms": round(1e3 * plan.step_seconds, 3),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown.

    Args:
        rows: what :func:`figures` returned.
    """
    yield (
        "| model | ranks | largest | by bucket: compute | padding | compute | state | padding | step, of whole | "
        "of least | how |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        by_bucket, plan = row["by_bucket"], row["plan"]
        faster = plan["step_ms"] / row["whole"]["step_ms"]
        cells = (
            row["model"],
            row["ranks"],
            f"{row['largest_over_mean']:.2f}",
            f"{by_bucket['compute']:.2f}",
            f"{by_bucket['padding']:.0%}",
            f"{plan['compute']:.3f}",
            f"{plan['state_bytes']:.3f}",
            f"{plan['padding']:.1%}",
            f"{faster:.2f}",
            f"{plan['step_ms'] / row['least']['step_ms']:.3f}",
            how(row),
        )
        yield f"| {' | '.join(str(cell) for cell in cells)} |"


def how(row: Mapping[str, Any]) -> str:
    """Return in words how a plan shares the matrices out.

    Args:
        row: what :func:`figures` returned.
    """
    divided, plan, least = row["divided"], row["plan"], row["least"]
    if "peers" in divided:
        shared = f"{divided['peers']} by up to {row['most_peers']} peers, {divided.get('whole', 0)} whole"
    elif "matrices" in divided:
        shared = f"{divided['matrices']} batches divided"
    else:
        shared = "whole"
    if plan["compute"] > GOAL:
        shared += ": no plan is faster" if plan["step_ms"] <= 1.001 * least["step_ms"] else ""
    if plan["state_bytes"] > MOST_MEMORY:
        slower = least["step_ms_with_level_state"] / plan["step_ms"] - 1
        shared += f"; with level state every plan is at least {slower:.0%} slower"
    return shared


def main() -> None:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", help="those whose names contain this")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    rows = [
        figures(model, form, ranks)
        for model in MODELS
        if options.models in model
        for form in (FORMS if any("experts" in name for name, _ in MODELS[model](True)) else ["matrices"])
        for ranks in options.ranks
    ]
    for form in FORMS:
        print(f"\nExperts as {form}\n" if form == "batches" else "")
        print("\n".join(table([row for row in rows if row["experts"] == form])))
    model = CostModel()
    assumed = {name: getattr(model, name) for name in model.__slots__ if not name.startswith("__")}
    if not options.models and tuple(options.ranks) == RANKS:
        write_result("balance", {"cost_model": assumed, "rows": rows})
    for row in rows:
        if row["plan"]["state_bytes"] > MOST_MEMORY:
            print(f"\n{row['model']}, {row['ranks']} ranks, all state: {with_the_rest(row)}")
    worst = max(rows, key=lambda row: row["planning_seconds"])
    print(f"\nplanning took at most {worst['planning_seconds']} s ({worst['model']}, {worst['ranks']} ranks)")
    print(json.dumps(assumed))


if __name__ == "__main__":
    main()
