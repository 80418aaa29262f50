"""Top-k with and without error feedback, 32 workers (survey of Tang et al. 2020, table 8).

python benchmarks/tables/compression.py --data DIR [--jobs 4] [--out tables]
"""

from __future__ import annotations

from trials import Trial, holds, options, run_all, show

SGD = {"kind": "SGD", "momentum": 0.9, "weight_decay": 1e-4}
PUBLISHED = {  # at the best of its four rates
    "dense": "89.77",
    "EF-top-k 10": "88.94",
    "EF-top-k 100": "88.69",
    "EF-top-k 1000": "87.76",
    "top-k 10": "86.75",
    "top-k 100": "77.66",
    "top-k 1000": "61.98",
}


def trial(name: str, ratio: int | None, feedback: str) -> Trial:
    """One row."""
    parallel = {"rule": SGD}
    if ratio is not None:
        top = {"kind": "TopK", "ratio": 1 / ratio, "per": "model"}
        parallel |= {"compress": top, "feedback": {"kind": feedback}}
    return Trial(
        name=name,
        rates=(0.03, 0.1, 0.3),
        data_parallel=parallel,
        model={"kind": "resnet20"},
        workers=32,
        batch=1024,
    )


def main() -> None:
    """Print the table."""
    given = options(__doc__)
    ratios = (10, 100, 1000)
    trials = [trial("dense", None, "None")]
    trials += [trial(f"EF-top-k {ratio}", ratio, "ErrorFeedback") for ratio in ratios]
    trials += [trial(f"top-k {ratio}", ratio, "None") for ratio in ratios]
    found = run_all("compression", trials, given)
    claims = [
        (
            "EF-top-k at 1000 is within 2.5 points of dense",
            lambda: holds(found["EF-top-k 1000"], found["dense"], by=-0.025),
        ),
        (
            "plain top-k loses more at 100 than at 10",
            lambda: holds(found["top-k 10"], found["top-k 100"]),
        ),
        (
            "plain top-k loses more at 1000 than at 100",
            lambda: holds(found["top-k 100"], found["top-k 1000"]),
        ),
    ]
    show("Compression, 32 workers, batch 1024", found, PUBLISHED, claims, "dense")


if __name__ == "__main__":
    main()
