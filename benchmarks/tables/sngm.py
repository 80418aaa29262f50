"""SNGM against momentum SGD and LARS at small and large batches (Zhao et al. 2024).

python benchmarks/tables/sngm.py --data DIR [--jobs 4] [--out tables]
"""

from __future__ import annotations

from trials import Trial, holds, options, run_all, show

DECAY = 5e-4
RULES = {
    "MSGD": ({"kind": "SGD", "momentum": 0.9}, {128: (0.05, 0.1, 0.2), 8192: (0.4, 0.8, 1.6)}),
    "LARS": ({"kind": "LARS", "momentum": 0.9}, {128: (1.0, 3.0, 10.0), 8192: (3.0, 10.0, 30.0)}),
    "SNGM": ({"kind": "SNGM", "momentum": 0.9}, {128: (0.05, 0.1, 0.2), 8192: (0.2, 0.4, 0.8)}),
}
PUBLISHED = {  # a pre-trained ViT, where ours is ResNet-20 from the start
    "MSGD 128": "98.96 (ViT)",
    "LARS 128": "99.08 (ViT)",
    "SNGM 128": "99.00 (ViT)",
    "MSGD 8192": "98.81 (ViT)",
    "LARS 8192": "98.85 (ViT)",
    "SNGM 8192": "99.00 (ViT)",
}


def main() -> None:
    """Print the table."""
    given = options(__doc__)
    trials = [
        Trial(
            name=f"{name} {batch}",
            rates=rates[batch],
            data_parallel={"rule": {**rule, "weight_decay": DECAY}},
            model={"kind": "resnet20"},
            workers=1,
            batch=batch,
        )
        for batch in (128, 8192)
        for name, (rule, rates) in RULES.items()
    ]
    found = run_all("sngm", trials, given)
    claims = [
        (
            f"SNGM is above {other} at batch 8192",
            lambda other=other: holds(found["SNGM 8192"], found[f"{other} 8192"]),
        )
        for other in ("MSGD", "LARS")
    ]
    show("SNGM, ResNet-20 on CIFAR-10", found, PUBLISHED, claims, "MSGD 128")


if __name__ == "__main__":
    main()
