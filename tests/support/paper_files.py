"""Small files in the formats of the data sets of the papers that anyone must bring."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from training_client.lab.data.surveys import BANK

PIXELS = np.arange(3 * 3072, dtype=np.uint16).reshape(3, 3072).astype(np.uint8)
LABELS = {10: [3, 0, 9], 100: [42, 0, 99]}


def write_cifar(folder: Path, classes: int, binary: bool) -> None:
    """Write three images to each file, in the format of the site or in that of torchvision."""
    names = ["train", "test"] if classes == 100 else [f"data_batch_{i}" for i in range(1, 6)]
    names += [] if classes == 100 else ["test_batch"]
    folder /= {
        (10, False): "cifar-10-batches-py",
        (10, True): "cifar-10-batches-bin",
        (100, False): "cifar-100-python",
        (100, True): "cifar-100-binary",
    }[classes, binary]
    folder.mkdir(parents=True)
    for name in names:
        if binary:
            coarse = [[7]] * 3 if classes == 100 else [[]] * 3
            rows = zip(coarse, LABELS[classes], PIXELS, strict=True)
            raw = b"".join(bytes([*first, label]) + row.tobytes() for first, label, row in rows)
            (folder / f"{name}.bin").write_bytes(raw)
        else:
            label = b"labels" if classes == 10 else b"fine_labels"
            held = {b"data": PIXELS, label: LABELS[classes], b"batch_label": b"one"}
            (folder / name).write_bytes(pickle.dumps(held, protocol=2))


def write_imdb(folder: Path) -> None:
    """Write two reviews of each class and split."""
    for split in ("train", "test"):
        for name, text in (("pos", "A <br />good film, don't miss"), ("neg", "A bad BAD film")):
            (folder / "aclImdb" / split / name).mkdir(parents=True)
            for at in range(2):
                (folder / "aclImdb" / split / name / f"{at}_8.txt").write_text(text)


def write_posts(file: Path) -> None:
    """Write questions, an answer and a question without tags, as in the data dump."""
    rows = [("1", f"title {at}", "<p>how to sort</p>", "<python><sorting>") for at in range(10)]
    rows += [("1", "other", "java generics", "|java|python|"), ("1", "none", "x", "")]
    rows += [("2", "", "an answer", "")]
    lines = [
        f"<row PostTypeId={quoteattr(kind)} Title={quoteattr(title)} Body={quoteattr(body)} "
        f"Tags={quoteattr(tags)} OwnerUserId='3' />"
        for kind, title, body, tags in rows
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("<?xml version='1.0'?>\n<posts>\n" + "\n".join(lines) + "\n</posts>\n")


def write_bank(file: Path, rows: int = 10) -> None:
    """Write a table as UCI's: quoted texts, semicolons."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, delimiter=";", quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow([*BANK.bounds, *BANK.codes, "y"])
        codes = [known[0] for known in BANK.codes.values()]
        for at in range(rows):
            writer.writerow([50, *[1] * 6, *codes, "yes" if at % 2 else "no"])
