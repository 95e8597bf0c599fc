"""Save a trained model as one file, whose hash the certificate names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from training_client.errors import DataError

SaveModel = Callable[[Path], Path]
_TENSORS: Final = ".safetensors"
_SUFFIXES: Final = (".pt", _TENSORS)


def check_model_file(name: str) -> str:
    """Return the name of a model's file; raise if its suffix is not supported.

    Raises:
        DataError: it names a folder, or another kind of file.
    """
    if Path(name).name != name or Path(name).suffix not in _SUFFIXES:
        raise DataError(
            f"model_file must be a file name that ends in {' or '.join(_SUFFIXES)}, not {name!r}"
        )
    return name


def model_saver(model: nn.Module, name: str | None) -> SaveModel | None:
    """Return a function that saves the model under `name` in a folder; None without a name."""
    return None if name is None else partial(_save_model, model, name)


def _save_model(model: nn.Module, name: str, folder: Path) -> Path:
    """Save a model by its own `save_pretrained`, or as a state dict, and return the file.

    Raises:
        DataError: the model's own method wrote other files, such as several parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.unlink(missing_ok=True)  # an earlier run's
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None and file.suffix == _TENSORS:
        save_pretrained(folder)
    else:
        _save_state(model.state_dict(), file)
    if not file.exists():
        written = ", ".join(sorted(each.name for each in folder.glob(f"*{_TENSORS}")))
        raise DataError(
            f"save_pretrained wrote {written or 'no tensors'} and not {name}: give the file's name "
            'as model_file, or "model.pt" for a model that is saved in several parts'
        )
    return file


def _save_state(state: dict[str, torch.Tensor], file: Path) -> None:
    """Save a state dict in the format that the file's suffix names."""
    if file.suffix == _TENSORS:
        from safetensors.torch import save_file  # of Hugging Face; no other format needs it

        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    else:
        torch.save(state, file)
