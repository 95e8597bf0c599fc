"""Write the two pictures of the README: the calculator and a budget page, in Chromium.

python -m scripts.pictures [FOLDER]
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

import httpx

from scripts.demo import PROGRAMS, find_free_port, wait_until_healthy

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
COLORS: Final = 128  # of the PNG's palette: enough for text and lines
VIEWPORT: Final = {"width": 1100, "height": 820}
BUDGET: Final = {"epsilon": 6.0, "delta": 1e-5}
RUNS: Final = (  # noise multiplier, steps of the plan, steps granted, purpose
    (1.1, 1200, 1200, "first model"),
    (1.4, 1500, 900, "wider network"),
)


def post(url: str, key: str, path: str, body: Any) -> Any:
    """Send a write request to the service, and return its answer."""
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
    answer = httpx.post(url + path, json=body, headers=headers, timeout=30)
    answer.raise_for_status()
    return answer.json()


def fill_ledger(url: str, key: str) -> None:
    """Create a dataset with one finished run and one that is still training."""
    post(url, key, "/v1/datasets", {"name": "patients", "size": 60_000, "budget": BUDGET})
    for noise_multiplier, steps, granted, purpose in RUNS:
        mechanism = {
            "kind": "dp_sgd",
            "noise_multiplier": noise_multiplier,
            "sample_rate": 0.01,
            "steps": steps,
        }
        body = {"mechanism": mechanism, "purpose": purpose}
        run = post(url, key, "/v1/datasets/patients/reservations", body)["id"]
        for sequence in range(0, granted, 100):
            grant = {"steps": 100, "sequence": sequence}
            post(url, key, f"/v1/reservations/{run}/grants", grant)
        if granted == steps:
            post(url, key, f"/v1/reservations/{run}/commit", {})


def save_png(screenshot: bytes, path: Path) -> None:
    """Save a screenshot as a PNG with a palette, at about a third of its size."""
    from PIL import Image

    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_screenshots(url: str, key: str, chromium: str, folder: Path) -> None:
    """Save screenshots of the calculator and of a budget page in a folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport=VIEWPORT, color_scheme="light").new_page()
        page.goto(url)
        page.wait_for_load_state("networkidle")
        save_png(page.screenshot(), folder / "calculator.png")
        page.goto(f"{url}/sign-in")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/datasets")
        page.goto(f"{url}/datasets/patients")
        page.wait_for_load_state("networkidle")
        save_png(page.screenshot(), folder / "budget.png")
        browser.close()


def main() -> int:
    """Start a service with a ledger of its own, take the pictures, stop the service."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pictures",
        description="Write the two pictures of the README, in Chromium.",
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=IMAGES)
    images = parser.parse_args().folder
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("Chromium is needed; Debian has it: apt-get install chromium", file=sys.stderr)
        return 1
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ACCOUNTANT_DATABASE_URL": f"sqlite:///{folder}/ledger.db"}
        accountant = PROGRAMS / "accountant"
        create_key = [accountant, "keys", "create", "--scope", "admin", "--name", "analyst"]
        key = subprocess.check_output(create_key, env=environment, text=True).strip()
        serve = [accountant, "serve", "--port", str(port)]
        service = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
        try:
            wait_until_healthy(url)
            fill_ledger(url, key)
            take_screenshots(url, key, chromium, images)
        finally:
            service.terminate()
            service.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
