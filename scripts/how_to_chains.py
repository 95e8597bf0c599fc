"""The chains of boxes that the drawings of the how-tos show."""

from __future__ import annotations

from typing import Final, NamedTuple


class Stage(NamedTuple):
    """A box of a chain.

    Attributes:
        title: what it is.
        lines: about it, below the title.
        notes: what may go wrong there, or the way back.
        then: what leads to the next box.
    """

    title: str
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    then: str = ""


CHAINS: Final[dict[str, tuple[str, list[Stage]]]] = {  # by the names of pages
    "installing": (
        "What to install on which machine",
        [
            Stage(
                "A machine that trains",
                ("privacy-accountant[train]: PyTorch, accountant-train",),
                then="asks over HTTP",
            ),
            Stage(
                "The machine of the service, or yours alone",
                ("privacy-accountant: calculator, command line,", "Python, pages, API"),
                then="keeps budgets in",
            ),
            Stage("A ledger", ("a file, or PostgreSQL with the extra postgres",)),
        ],
    ),
    "serving": (
        "From a client to the ledger",
        [
            Stage(
                "Browsers and training jobs",
                ("ACCOUNTANT_SERVICE=https://accountant.example.org",),
                then="HTTPS, port 443",
            ),
            Stage("nginx or Caddy", ("has the certificate",), then="HTTP, 127.0.0.1:8000"),
            Stage("accountant serve", ("systemd starts it, as a user of its own",), then="writes"),
            Stage("/var/lib/accountant/accountant.db", ("the ledger",), ("Back it up.",)),
        ],
    ),
    "upgrading": (
        "An upgrade, and the way back at each stage",
        [
            Stage(
                "The old servers run",
                ("Back up, and verify the copy.",),
                ("The way back: the old environment",),
                "install the new version beside the old one",
            ),
            Stage(
                "The first new server starts",
                ("It changes the tables.",),
                (
                    "The way back: the same, if both versions may run",
                    "at the same time. If not: stop all training, restore",
                    "the backup, and enter the steps granted since",
                ),
                "start the others",
            ),
            Stage(
                "The old servers stop", ("accountant ledger verify",), ("The way back: the same",)
            ),
        ],
    ),
    "csv": (
        "From a table to a certified model",
        [
            Stage(
                "data/visits/train.csv",
                ("a class, then numbers: 1,5,7",),
                then="accountant dataset create",
            ),
            Stage("A budget", ("ε = 2, for all runs on these records",), then="accountant plan"),
            Stage("A plan", ("batch size, steps, noise",), then="accountant-train run"),
            Stage(
                "Training", ("each block of steps is charged, then made",), then="when the run ends"
            ),
            Stage(
                "model.pt and certificate.json", ("anyone can verify them, without the service",)
            ),
        ],
    ),
    "from-opacus": (
        "One step with Opacus",
        [
            Stage("Your loop", ("forward, backward: as before",), then="optimizer.step()"),
            Stage(
                "Opacus' optimizer",
                ("clips, adds up, and adds noise, which is exact here",),
                then="before the update",
            ),
            Stage(
                'PrivacyEngine(accountant="remote")',
                ("Does this step fit?",),
                ("No: BudgetExhaustedError, the parameters stay",),
                "yes",
            ),
            Stage("New parameters"),
        ],
    ),
    "troubleshooting": (
        "Where to look",
        [
            Stage("Your shell", (), ("command not found: PATH",), "starts"),
            Stage(
                "accountant-train",
                (),
                ('"needs torch": privacy-accountant[train]',),
                "ACCOUNTANT_SERVICE, ACCOUNTANT_API_KEY",
            ),
            Stage(
                "The service",
                (),
                ("does not answer: accountant serve", "401, 403, 404: another key"),
                "ACCOUNTANT_DATABASE_URL",
            ),
            Stage("The ledger", (), ('"There is no ledger": another folder',), "counts"),
            Stage("The budget", (), ("409: fewer steps or more noise",)),
        ],
    ),
    "auditing": (
        "What an auditor exports and checks",
        [
            Stage("The service", ("a key of scope auditor",), then="accountant ledger export"),
            Stage(
                "entries.jsonl, on any machine",
                ("one line an entry",),
                then="accountant ledger verify",
            ),
            Stage(
                "Every hash, every rule, every cost",
                ("without service, database or key",),
                ("Missing at the end? Compare with an earlier head.",),
            ),
        ],
    ),
    "backup": (
        "What to keep, and what to do when it is needed",
        [
            Stage(
                "The ledger, in use",
                (),
                ("cp misses the latest entries",),
                "accountant db backup; entries exported more often",
            ),
            Stage("A copy, and entries.jsonl", (), then="a disk fails: stop all training"),
            Stage(
                "The copy is restored",
                ("accountant ledger verify",),
                then="compare with entries.jsonl",
            ),
            Stage(
                "Missing steps are entered",
                ("accountant run reserve, grant, commit",),
                ("Not all found? Close the dataset.",),
                "then only",
            ),
            Stage("The service starts"),
        ],
    ),
    "by-role": (
        "Which script is yours",
        [
            Stage(
                "A question about ε or σ", ("researcher.sh, engineer.sh",), then="a budget for data"
            ),
            Stage(
                "A limit, and a report to sign", ("privacy_officer.sh",), then="training within it"
            ),
            Stage(
                "A model with a certificate",
                ("training_engineer.sh, operator.sh",),
                then="is it true?",
            ),
            Stage("A check of the claim", ("auditor.sh",)),
        ],
    ),
    "closing-a-dataset": (
        "What closing does",
        [
            Stage("An open dataset", (), then="accountant dataset close"),
            Stage(
                "Closed, for good",
                ("new plans: refused (dataset-closed)", "its record and reports stay"),
                then="its open runs",
            ),
            Stage("go on to their end", ("and commit",), ("or: accountant run release, at once",)),
        ],
    ),
    "fine-tuning": (
        "What is trained, and what is protected",
        [
            Stage(
                "A pretrained model",
                ("its training data are not yours",),
                then="with LoRA, or in full",
            ),
            Stage("Its parameters, or a few new ones", (), then="each step: one gradient a text"),
            Stage(
                "Clipped, added up, noise", ("charged before it is made",), then="when the run ends"
            ),
            Stage("The fine-tuned model", ("a certificate for your texts",)),
        ],
    ),
    "frameworks": (
        "Who does what",
        [
            Stage(
                "Opacus, Lightning or Hugging Face",
                ("your loop or Trainer, as before",),
                then="a step",
            ),
            Stage(
                "A budget, or a callback",
                ("asks, charges, and counts batches",),
                ("Skipped steps and shuffled loaders: refused",),
                "fits",
            ),
            Stage("The step is made", (), then="at the end"),
            Stage("privacy.json, certificate.json"),
        ],
    ),
    "gpu": (
        "What runs where",
        [
            Stage("CPU", ("batches and exact noise are drawn",), then="copied"),
            Stage(
                "GPU",
                ("per-example gradients, clipping, the sum",),
                ("Half-precision parameters: refused",),
                "checked by",
            ),
            Stage("benchmarks.gpu_check", ("compares each optimizer with the CPU",)),
        ],
    ),
    "importing": (
        "From another tool's words to a proved ε",
        [
            Stage(
                "A history, an event or a configuration",
                ("Opacus, dp_accounting, TensorFlow Privacy, …",),
                then="accountant import",
            ),
            Stage(
                "A mechanism, and its proved ε",
                (),
                ("Unknown keys: an estimate", "Contradictions: refused"),
                "compared with the claim",
            ),
            Stage("holds · loose · too small · not proved"),
        ],
    ),
    "releases-made-elsewhere": (
        "From another program's release to its certificate",
        [
            Stage(
                "What the program will release",
                ("its noise, or its ε, (ε, δ) or ρ",),
                then="accountant charge",
            ),
            Stage(
                "The dataset's budget",
                ("charged for good",),
                ("Refused: do not run it.",),
                then="then",
            ),
            Stage("OpenDP, SmartNoise, Tumult, a spreadsheet", ("makes the release",)),
        ],
    ),
    "monthly-data": (
        "A dataset a month",
        [
            Stage(
                "The series sales",
                ("ε = 1 for each month, for good",),
                then="accountant series add",
            ),
            Stage(
                "sales-2026-01 … sales-2026-12",
                ("a report is charged to its month",),
                then="a window of 12",
            ),
            Stage(
                "One model of the year",
                ("charged in full to each month, or to none",),
                ("A person in m months: ε = m",),
            ),
        ],
    ),
    "postgresql": (
        "Several servers, one ledger",
        [
            Stage("Clients", (), then="any of"),
            Stage(
                "accountant serve, on several machines",
                ("they share keys and budgets",),
                then="transactions",
            ),
            Stage(
                "PostgreSQL",
                ("locks a dataset while it is charged",),
                ("Only this user may write to it.",),
            ),
        ],
    ),
    "quotas": (
        "How many requests a key may send",
        [
            Stage("A key with a quota", ("60 requests a minute",), then="each request"),
            Stage("Counted in the database", ("for all servers together",), then="above it"),
            Stage("429, with Retry-After", ("clients of this project wait, then go on",)),
        ],
    ),
    "reports": (
        "Who reads what",
        [
            Stage("A certificate, or the ledger", (), then="accountant report"),
            Stage(".html, .pdf", ("a privacy officer signs the first page",), then="or"),
            Stage(
                ".yaml, .md, .json",
                ("registry, model card, programs",),
                ('What only you know is marked "open".',),
            ),
        ],
    ),
    "rotating-keys": (
        "From an old key to a new one",
        [
            Stage(
                "The old key", ("scope run, team vision",), then="accountant keys create, same team"
            ),
            Stage(
                "Both keys",
                ("the job goes on with --resume",),
                then="accountant keys list: last used",
            ),
            Stage(
                "The old key is revoked",
                ("refused at once",),
                ("Leaked? Revoke first, then find what it did.",),
            ),
        ],
    ),
    "several-processes": (
        "One step in several processes",
        [
            Stage("Rank 0", ("asks the budget for the step",), then="granted, to all"),
            Stage("Each rank", ("draws from its own records, clips, adds up",), then="all_reduce"),
            Stage(
                "The sum of all",
                ("rank 0 adds noise once; all update alike",),
                ("The sums have no noise: one owner of all.",),
            ),
        ],
    ),
    "several-sites": (
        "One round at several sites",
        [
            Stage("The server", ("sends parameters",), then="to each site"),
            Stage(
                "A site",
                ("charges its own budget, then trains", "and adds noise"),
                ("Spent? It leaves, and says so.",),
                "a contribution with noise",
            ),
            Stage("The server averages", ("it need not be trusted with records",)),
        ],
    ),
    "sharing-a-budget": (
        "Caps share a budget",
        [
            Stage("The budget of patients", ("ε = 3",), then="accountant caps set"),
            Stage(
                "vision: at most .3 · speech: at most .5",
                ("a run takes its share when reserved",),
                then="more",
            ),
            Stage(
                "Refused: cap-exhausted",
                (),
                ("Keys without a cap may take all: cap every team.",),
            ),
        ],
    ),
    "solving-for-risk": (
        "From a risk to σ",
        [
            Stage(
                "A risk",
                ("at most 1 in 100 found, 1 in 1000 accused",),
                then="accountant noise-multiplier",
            ),
            Stage("σ, rounded up", ("its upper bound meets the risk",), then="for your records"),
            Stage("The (ε, δ) that goes with it"),
        ],
    ),
    "tracking": (
        "What a tracker is told",
        [
            Stage("Training", ("ε and δ after each step",), then="log_spent"),
            Stage("MLflow or Weights & Biases", (), then="at the end: the certificate"),
            Stage(
                "The registry",
                ("a model whose SHA-256 the certificate names",),
                ("No certificate: NoGuaranteeError",),
            ),
        ],
    ),
    "training-loops": (
        "Three lines that change",
        [
            Stage(
                "private_batches(optimizer, data)", ("in place of a DataLoader",), then="a batch"
            ),
            Stage(
                "optimizer.step(inputs, targets, losses)",
                ("charged first; losses: one for each record",),
                ("The budget is spent? The loop ends.",),
                "when it ends",
            ),
            Stage("settle(budget, steps, folder)", ("privacy.json, certificate.json",)),
        ],
    ),
    "webhooks": (
        "From a charge to your receiver",
        [
            Stage(
                "A reservation passes a share",
                ("80 % of the budget",),
                then="stored with its entry",
            ),
            Stage("An event waits", ("posted until 2xx, with longer pauses",), then="POST, signed"),
            Stage(
                "Your receiver",
                ("checks the signature and the time",),
                ("It may come twice: keep the id.",),
            ),
        ],
    ),
    "what-to-run": (
        "From a budget to a run",
        [
            Stage("ε, δ, records, epochs", (), then="accountant plan"),
            Stage(
                "Batch, steps, σ",
                ("σ is proved; the batch is a rule of thumb",),
                ("Trials on private data are charged too.",),
                "the commands that it prints",
            ),
            Stage("accountant epsilon, accountant-train run"),
        ],
    ),
}
