"""Print how often each engine was compared with ball arithmetic, by kind, question and direction.

`python -m tests.enclosures [--points N] [--seed N]` ends with 1 if the truth was outside a bound.
"""

from __future__ import annotations

import argparse
import sys

from tests.enclosures.engines import DRAWS, compare_random_cases


def main() -> int:
    """Compare, print the table and the bounds that do not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20, help="cases of each kind and direction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds with this word, such as twice")
    options = parser.parse_args()
    draws = tuple(draw for draw in DRAWS if options.only in draw.__name__)
    tally = compare_random_cases(options.seed, options.points, draws)
    print(tally.table())
    print(*tally.outside, sep="\n", file=sys.stderr)
    return bool(tally.outside)


if __name__ == "__main__":
    sys.exit(main())
