"""Privacy accounting for differentially private training: functions, and a service.

```python
from accountant_service import epsilon, noise_multiplier

epsilon(delta=1e-5, noise_multiplier=1.1, dataset_size=60000, batch_size=600, epochs=10).epsilon
noise_multiplier(epsilon=2, delta=1e-5, dataset_size=60000, batch_size=600, epochs=10)
```

The functions take the options of the command line as keyword arguments. Importing them is quick:
NumPy and all else is imported when a function is first called. See README.md and docs/.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accountant_service.version import __version__

__all__ = [
    "__version__",
    "compare",
    "delta",
    "epsilon",
    "import_document",
    "noise_multiplier",
    "plan",
    "sample_rate",
    "solve",
    "steps",
]

if TYPE_CHECKING:
    from accountant_service.questions.functions import (
        compare,
        delta,
        epsilon,
        import_document,
        noise_multiplier,
        plan,
        sample_rate,
        solve,
        steps,
    )


def __getattr__(name: str) -> Any:
    """Return a function of the package, importing it when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.questions.functions"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the names in the package, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
