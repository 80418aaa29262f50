"""Seconds of a whole profile, made and then found again.

python benchmarks/gpu/profiling.py [--model llama-7b] [--devices N]
"""

from __future__ import annotations

import argparse

from stand import Stand, setting, where


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--devices", type=int)
    given = parser.parse_args()
    print(where())
    print("| model | compiled | seconds | overlap | context GiB | product TFLOP/s |")
    print("|---|---|---|---|---|---|")
    with Stand() as stand:
        for name in given.model or ("llama-7b",):
            for compiled in (False, True):
                asked = setting(name, given.devices, compiled=compiled)
                found, took_s = stand.profile(asked)
                print(
                    f"| {name} | {'yes' if compiled else 'no'} | {took_s:.1f} | "
                    f"{found.overlap:.2f} | {found.context_bytes / 2**30:.2f} | "
                    f"{found.matmul_flops / 1e12:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
