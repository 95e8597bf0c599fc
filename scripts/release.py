"""Build a release from the last commit: `make release`.

python -m scripts.release           # into dist/
python -m scripts.release FOLDER

The folder then holds the wheel and the source archive, both with the documentation, the man pages,
a CycloneDX bill of the wheel's dependencies, the notes, and SHA256SUMS of these. Two builds of one
commit are equal, byte by byte: the tools have the versions of constraints.txt, and all dates are
the commit's. Where Docker is at hand, image.json names the image that was built and its digest;
that one depends on Debian's packages of the day, so it is not in SHA256SUMS.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from accountant_service.version import __version__
from scripts import man_pages

ROOT: Final = Path(__file__).parents[1]
NAME: Final = "privacy-accountant"
CHECKSUMS: Final = "SHA256SUMS"
IMAGE: Final = "image.json"
_SERVED_SITE: Final = "accountant_service/web/documentation"
_QUESTION: Final = "epsilon -q 0.01 -s 1.1 -t 1000 -d 1e-5 --json"


def run(*command: object, **settings: Any) -> str:
    """Run a command, and return what it prints; its errors are shown.

    Raises:
        CalledProcessError: the command failed.
    """
    words = [str(each) for each in command]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **settings)
    return done.stdout


def read_notes(changes: str, version: str) -> str:
    """Return the section of a version in CHANGELOG.md, without its heading.

    Raises:
        ValueError: there is no such section.
    """
    found = re.search(
        rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section '## {version}': write one, and commit it")
    return found[1].strip()


def pack(folder: Path, archive: Path, seconds: int) -> None:
    """Write a .tar.gz of a folder's files in which nothing depends on when and where it is made.

    Args:
        folder: the files, without folders inside.
        archive: the file to write.
        seconds: the time of every file, in seconds since 1970.
    """
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for file in sorted(folder.iterdir()):
            entry = tarfile.TarInfo(f"{folder.name}/{file.name}")
            entry.size, entry.mtime = file.stat().st_size, seconds
            tar.addfile(entry, io.BytesIO(file.read_bytes()))


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS of a folder's files, to be checked with `sha256sum --check`."""
    files = sorted(each for each in folder.iterdir() if each.name not in (CHECKSUMS, IMAGE))
    lines = (f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files)
    (folder / CHECKSUMS).write_text("".join(lines))


def build_documentation(source: Path, seconds: int) -> None:
    """Build the documentation of a folder into its package, dated in seconds since 1970."""
    dated = os.environ | {"SOURCE_DATE_EPOCH": str(seconds), "NO_MKDOCS_2_WARNING": "1"}
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    run(*mkdocs, "--site-dir", _SERVED_SITE, cwd=source, env=dated)


def build_packages(source: Path, folder: Path, seconds: int) -> None:
    """Build the wheel and the source archive of a folder, dated in seconds since 1970."""
    dated = os.environ | {"SOURCE_DATE_EPOCH": str(seconds)}
    arguments = ["-m", "build", "--no-isolation", "--outdir", folder, source]
    run(sys.executable, *arguments, env=dated)


def write_bill(folder: Path, environment: Path) -> None:
    """Install the wheel as users do, try it, and write a CycloneDX bill of what it needs.

    Args:
        folder: the folder of the wheel, to which the bill is written.
        environment: the folder of a new environment.
    """
    run(sys.executable, "-m", "uv", "venv", "--quiet", environment)
    install = [sys.executable, ROOT / "scripts/install.py", environment, "--quiet"]
    wheel = ["--find-links", folder, f"{NAME}=={__version__}"]
    run(*install, "--constraint", ROOT / "constraints.txt", *wheel)
    answer = json.loads(
        run(environment / "bin/accountant", *_QUESTION.split(), cwd=environment.parent)
    )
    assert answer["status"] == "proven"
    run(
        sys.executable, "-m", "cyclonedx_py", "environment", environment / "bin/python",
        "--output-reproducible", "--output-format", "JSON",
        "--output-file", folder / f"{NAME}-{__version__}.cdx.json",
    )  # fmt: skip


def build_image(source: Path, commit: str) -> dict[str, str] | None:
    """Build the service's image with its labels; return its name and digest.

    Returns None where no Docker daemon answers.
    """
    if shutil.which("docker") is None:
        return None
    asked = subprocess.run(["docker", "info"], capture_output=True, check=False)
    if asked.returncode:
        return None
    tag = f"{NAME}:{__version__}"
    secret = os.environ.get("PIP_CONFIG_FILE", "/dev/null")
    run(
        "docker", "build", "--quiet", "--target", "service", "--tag", tag,
        "--secret", f"id=pip,src={secret}",
        "--build-arg", f"VERSION={__version__}", "--build-arg", f"REVISION={commit}", source,
    )  # fmt: skip
    digest = run("docker", "image", "inspect", "--format", "{{.Id}}", tag).strip()
    return {"image": tag, "digest": digest, "revision": commit}


def export(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")


def build(folder: Path) -> None:
    """Build all files of the release of the last commit into an empty folder.

    Raises:
        ValueError: CHANGELOG.md does not describe the version.
    """
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    seconds = int(run("git", "show", "--no-patch", "--format=%ct", commit, cwd=ROOT))
    with tempfile.TemporaryDirectory() as made:
        source = Path(made, "source")
        export(commit, source)
        notes = read_notes((source / "CHANGELOG.md").read_text(), __version__)
        print("1 of 5: the documentation", flush=True)
        build_documentation(source, seconds)
        print("2 of 5: the wheel and the source archive", flush=True)
        build_packages(source, folder, seconds)
        print("3 of 5: the man pages", flush=True)
        pages = Path(made, f"{NAME}-{__version__}-man")
        man_pages.write_all(pages)
        pack(pages, folder / f"{pages.name}.tar.gz", seconds)
        print("4 of 5: the wheel in a new environment, and its bill of materials", flush=True)
        write_bill(folder, Path(made, "environment"))
        (folder / "NOTES.md").write_text(f"# {NAME} {__version__}\n\n{notes}\n")
        write_checksums(folder)
        print("5 of 5: the image", flush=True)
        if (image := build_image(source, commit)) is None:
            print("No Docker daemon answers here: there is no image")
        else:
            (folder / IMAGE).write_text(json.dumps(image, indent=1) + "\n")


def main() -> int:
    """Read the arguments, and build the release."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    if run("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT):
        parser.error("there are changes that are not committed: a release is built from a commit")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty: delete it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build(folder.resolve())
    except ValueError as error:
        parser.error(str(error))
    print((folder / CHECKSUMS).read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
