"""GMC against DGC at 0.1 %, equal and unequal data (Zhao et al. 2019, as in the slides).

python benchmarks/tables/gmc.py --data DIR [--jobs 4] [--out tables]
"""

from __future__ import annotations

from trials import Trial, holds, options, run_all, show

FEEDBACKS = {
    "GMC": {"kind": "GMC", "momentum": 0.9},
    "DGC without masking": {"kind": "DGC", "momentum": 0.9, "masking": False},
    "DGC with masking": {"kind": "DGC", "momentum": 0.9},
}
PUBLISHED = {
    "IID GMC": "92.30",
    "IID DGC without masking": "92.30",
    "IID DGC with masking": "92.44",
    "non-IID GMC": "86.51",
    "non-IID DGC without masking": "81.93",
    "non-IID DGC with masking": "67.13",
}


def trials() -> list[Trial]:
    """Both halves of the table, with a dense run each."""
    found = []
    for data in ("IID", "non-IID"):
        unequal = data == "non-IID"
        more = {
            "model": {"kind": "resnet20", "norm": "group" if unequal else "batch"},
            "workers": 8,
            "batch": 256,
            "partition": {"kind": "classes", "per_worker": 2} if unequal else {"kind": "iid"},
            "rates": (0.03, 0.1, 0.3),
        }
        dense = {"rule": {"kind": "SGD", "momentum": 0.9, "weight_decay": 1e-4}}
        found.append(Trial(name=f"{data} dense", data_parallel=dense, **more))
        for name, feedback in FEEDBACKS.items():
            parallel = {
                "rule": {"kind": "SGD", "weight_decay": 1e-4},
                "compress": {"kind": "TopK", "ratio": 1e-3, "per": "model"},
                "feedback": feedback,
            }
            found.append(Trial(name=f"{data} {name}", data_parallel=parallel, **more))
    return found


def main() -> None:
    """Print the table."""
    given = options(__doc__)
    found = run_all("gmc", trials(), given)

    def close() -> str:
        names = [f"IID {name}" for name in FEEDBACKS]
        pairs = [(a, b) for a in names for b in names if a != b]
        said = {holds(found[a], found[b], by=-0.015) for a, b in pairs}
        return next(
            verdict for verdict in ("does not hold", "undecided", "holds") if verdict in said
        )

    claims = [
        (
            "non-IID: GMC is above DGC without masking",
            lambda: holds(found["non-IID GMC"], found["non-IID DGC without masking"]),
        ),
        (
            "non-IID: DGC without masking is above DGC with masking",
            lambda: holds(found["non-IID DGC without masking"], found["non-IID DGC with masking"]),
        ),
        ("IID: all within 1.5 points", close),
    ]
    show("GMC, 8 workers, batch 256, 0.1 % of the entries", found, PUBLISHED, claims, "IID dense")


if __name__ == "__main__":
    main()
