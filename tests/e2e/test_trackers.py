"""MLflow and Weights & Biases, offline: docs/how-to/tracking.md runs, and refuses what it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pages import ROOT, Block, Page, Session

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
PAGE = Page.read(ROOT / "docs/how-to/tracking.md")
PACKAGES = ("mlflow-skinny", "wandb")
SETUP = """
accountant dataset create visits --size 1000 --epsilon 8 --delta 1e-5
export ACCOUNTANT_API_KEY=$(accountant keys create --scope run --dataset visits)
accountant serve
"""
CHECK_MLFLOW = """
from mlflow import MlflowClient

client = MlflowClient()
logged = client.get_run(version.run_id)
history = client.get_metric_history(version.run_id, "privacy/epsilon")
certificate = json.loads(Path("runs/mlflow/certificate.json").read_text())
assert [each.step for each in history] == [10, 20]
assert 0 < history[0].value <= history[1].value == certificate["guarantee"]["epsilon"], history
assert logged.data.metrics["privacy/delta"] == 1e-5
assert logged.data.tags["privacy.status"] == "proven"
assert logged.data.tags["privacy.model_sha256"] == certificate["declared"]["model_sha256"]
files = [each.path for each in client.list_artifacts(version.run_id, "privacy")]
assert files == ["privacy/certificate.json", "privacy/privacy.json"]
kept = Path(version.source.removeprefix("file://"))
assert (kept / "model.pt").read_bytes() == Path("runs/mlflow/model.pt").read_bytes()
assert (kept / "certificate.json").exists()
assert version.tags["privacy.dataset"] == "visits"
"""
CHECK_WANDB = """
assert artifact.type == "model"
assert sorted(artifact.manifest.entries) == ["certificate.json", "model.pt"]
assert artifact.metadata["privacy.dataset"] == "visits"
run = wandb.init(project="visits", mode="offline")
logged = []
run.log_artifact = logged.append
tracker = WandbTracker(run, every=2)
for step in range(1, 6):
    tracker.log_spent(step, step / 10, 1e-5)
tracker.log_run(Path("runs/wandb"))
assert (run.summary["privacy/epsilon"], run.summary["privacy/step"]) == (0.4, 4)
claim = json.loads(Path("runs/wandb/privacy.json").read_text())
assert run.summary["privacy.epsilon"] == claim["epsilon"] > 0
assert run.summary["privacy.model_sha256"] == claim["model_sha256"]
assert [sorted(each.manifest.entries) for each in logged] == [["certificate.json", "privacy.json"]]
run.finish()
"""
CHECK_REFUSALS = """
from training_client.errors import DataError, NoGuaranteeError

Path("other.pt").write_bytes(b"another model")
run = wandb.init(project="visits", mode="offline")
logged = []
run.log_artifact = logged.append
with mlflow.start_run():
    for register in (register_model, lambda *a, **k: log_model(run, *a, **k)):
        for model, key in (("other.pt", public_key), ("runs/mlflow/model.pt", "00" * 32)):
            try:
                register("refused", model, "runs/mlflow/certificate.json", public_key=key)
            except NoGuaranteeError:
                continue
            raise AssertionError(f"{model} was registered")
run.finish()
assert logged == []
assert [each.name for each in client.search_registered_models()] == ["visits"]
try:
    MlflowTracker().log_spent(1, 0.1, 1e-5)
except DataError as error:
    assert "mlflow.start_run()" in str(error)
else:
    raise AssertionError("without a run, nothing can be logged")
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("trackers")
    with Session(folder, Page((), packages=PACKAGES)) as session:
        session.run(Block("setup", "console", SETUP))
        for block in PAGE.blocks:
            if block.language == "python":
                session.run(block)
        yield session


@pytest.mark.parametrize("code", [CHECK_MLFLOW, CHECK_WANDB, CHECK_REFUSALS])
def test_what_the_page_logs_and_registers(code: str, session: Session) -> None:
    session.run(Block("check", "python", code))
