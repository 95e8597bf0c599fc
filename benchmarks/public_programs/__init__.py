"""Small versions of public programs, as people write them: do private steps train them, and right?

Each module holds the programs of an area, and `program` compares what the engine makes of one with
the definition. `python -m benchmarks.public_programs` runs them all and prints a table.
"""

from __future__ import annotations

from typing import Final

from benchmarks.public_programs import generative, mixing, sequences, tables, text, vision
from benchmarks.public_programs.program import PROGRAMS as _FOUND
from benchmarks.public_programs.program import Outcome, Program, run_program

__all__ = ["PROGRAMS", "SECTIONS", "Outcome", "Program", "run_program"]

SECTIONS: Final = {
    vision.__name__: "Images and points",
    generative.__name__: "Generative models and differential equations",
    sequences.__name__: "Sequences",
    text.__name__: "Transformers",
    tables.__name__: "Tables, graphs and decisions",
    mixing.__name__: "Programs that mix examples, or keep them",
}
PROGRAMS: Final = {
    each.name: each for section in SECTIONS for each in _FOUND if each.build.__module__ == section
}
