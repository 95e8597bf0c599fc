"""The federated demo: eight sites, each with its own budget, train one model through Flower.

Everything runs as its own process, as it would on nine machines: the accounting service, Flower's
SuperLink, eight SuperNodes, and `flwr run`, which starts the training. The last table compares the
rounds that each site's ledger charged with the rounds that the site recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from scripts.demo import PROGRAMS, create_dataset, find_free_port, interrupt, wait_until_healthy
from training_client.budget import NoBudget
from training_client.client import AccountingService
from training_client.lab.federated import (
    AdaptiveParticipant,
    Contributor,
    Participant,
    train_federated,
)
from training_client.lab.federated_averaging import FedAvgParticipant
from training_client.lab.models import cross_entropy
from training_client.plan import Plan

APP: Final = Path(__file__).parents[1] / "examples" / "flower"
EPSILON: Final = 8.0
DELTA: Final = 1e-5
WHOLE_SITE: Final = "all records of the site"
LOCAL_EPOCHS: Final = 5  # of fedavg
RECORDS_MIN: Final = 20  # of a site, in generated data
SITES_SHOWN: Final = 20  # in the last table, each with a row of its own
INTERRUPTED: Final = 130
SERVER_PROCESSES: Final = frozenset({"flwr-serverapp", "flwr-simulation"})  # of the server's app
_POLL_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 20.0
_SUBMIT_SECONDS: Final = 120.0


def parse_arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts.demo_federated")
    parser.add_argument("--output", type=Path, default=Path("runs/federated"))
    parser.add_argument("--data", default="generated", choices=("generated", "adult", "mnist"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--method", default="a-ddp", choices=list(METHODS))
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument(
        "--ray",
        action="store_true",
        help="run the sites in a few processes of Flower's simulation (Ray), for many sites",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--short-rounds", type=int, default=2, help="rounds of the first site")
    parser.add_argument("--site-rounds", type=int, help="rounds of each other site; as --rounds")
    parser.add_argument(
        "--simulate",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="TIMES",
        help="also train the same sites in one process, so many times; once without a number",
    )
    rates = ", ".join(f"{method.server_rate:g} for {name}" for name, method in METHODS.items())
    parser.add_argument("--learning-rate", type=float, help=f"of the server; {rates}")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="folder of flwr's programs")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="limit for each round; the start is one"
    )
    parser.add_argument(
        "--round-seconds",
        type=float,
        default=150.0,
        help="how long the server waits for the sites; their first programs start slowly",
    )
    return parser.parse_args(given)


@dataclass(frozen=True)
class Method:
    """Settings of a federated method: rates, local steps, noise and privacy unit.

    Attributes:
        server_rate: the server's learning rate; 1 if sites send updates of the model.
        learning_rate: of a site, if it trains locally.
        local_steps: the number of private steps in a round.
        sample_rate: q.
        noise_multiplier: σ.
        privacy_unit: what the dataset's budget protects.
    """

    server_rate: float = 1.0
    learning_rate: float = 0.2
    local_steps: int = 1
    sample_rate: float = 0.2
    noise_multiplier: float = 2.0
    privacy_unit: str = "record"


METHODS: Final = {
    "a-ddp": Method(server_rate=0.5),
    "adadps": Method(local_steps=3),
    "fedavg": Method(
        learning_rate=2.0, sample_rate=1.0, noise_multiplier=4.0, privacy_unit=WHOLE_SITE
    ),
}


@dataclass
class Processes:
    """The programs of a federation, each with a log file in the folder.

    Attributes:
        folder: the folder of the run.
        environment: the environment variables of all programs.
        running: the programs started, by name.
    """

    folder: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path) -> None:
        """Start a program in a process group of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(each) for each in command],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to a program and all that it started, as a crash of its machine would."""
        process = self.running.pop(name)
        kill_all([process.pid, *descendants_of(process.pid)])
        process.wait(_STOP_SECONDS)

    def stop_all(self) -> None:
        """Stop all programs; kill what is left of them."""
        started = [pid for each in self.running.values() for pid in descendants_of(each.pid)]
        for process in self.running.values():
            process.terminate()  # before any is waited for
        for name in list(self.running)[::-1]:
            try:
                self.running[name].wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill(name)
        kill_all(started)


def descendants_of(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for child, parent in list_processes("pid,ppid"):
        children.setdefault(int(parent), []).append(int(child))
    found = [pid]
    for each in found:  # it grows
        found += children.get(each, [])
    return found[1:]


def list_processes(columns: str) -> list[list[str]]:
    """Return these columns of `ps` for each process of this machine."""
    named = ",".join(f"{each}=" for each in columns.split(","))
    found = subprocess.run(["ps", "-A", "-o", named], check=True, text=True, stdout=subprocess.PIPE)
    return [line.split() for line in found.stdout.splitlines()]


def kill_all(processes: list[int]) -> None:
    """Send SIGKILL to processes; some may have ended."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


class Federation:
    """A federation on this machine: the service, the SuperLink and a SuperNode for each site.

    Args:
        options: the demo's options.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.output.resolve()
        self.programs: Path = options.programs.absolute()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.ports = {name: find_free_port() for name in ("service", "link")}
        environment = {
            **os.environ,
            "ACCOUNTANT_DATABASE_URL": f"sqlite:///{self.folder / 'ledger.db'}",
            "FLWR_HOME": str(self.folder / "flower"),
            "SITES_FOLDER": str(self.folder),  # of simulated sites
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes = Processes(self.folder, environment)
        self.url = f"http://127.0.0.1:{self.ports['service']}"
        self.app, self.submitted = APP, 0  # Flower's app, and how often it was started
        self.epsilons = dict.fromkeys(self.sites, EPSILON)
        self._server_was_seen = False  # the server's process, since `submit`
        self._rounds_printed, self._round_began = 0, time.monotonic()

    @property
    def sites(self) -> list[str]:
        """The names of the sites, which are those of their datasets in the ledger."""
        return [f"site-{number}" for number in range(1, self.options.sites + 1)]

    def start_service(self) -> None:
        """Start the accounting service, and create a key."""
        environment = self.processes.environment
        made = subprocess.run(
            [self.programs / "accountant", "keys", "create", "--scope", "admin"],
            env=environment, check=True, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        environment["ACCOUNTANT_API_KEY"] = made.stdout.strip()
        port = str(self.ports["service"])
        self.processes.start("service", self.programs / "accountant", "serve", "--port", port)
        wait_until_healthy(self.url)

    def divide_data(self) -> None:
        """Write each site's records and settings to its folder; the server gets public records."""
        train, test = load_data(self.options)
        size = len(train[1]) // len(self.sites)
        write_records(self.folder / "server" / "public.npz", *test)
        for number, name in enumerate(self.sites):
            rows, home = slice(number * size, (number + 1) * size), self.folder / name
            write_records(home / "records.npz", train[0][rows], train[1][rows])
            usual = self.options.site_rounds or self.options.rounds
            rounds = self.options.short_rounds if number == 0 else usual
            (home / "site.json").write_text(json.dumps(self._settings(name, size, rounds, test)))

    def _settings(self, name: str, size: int, rounds: int, public: Any) -> dict[str, Any]:
        """Return a site's settings: its dataset, plan and number of rounds."""
        method = METHODS[self.options.method]
        plan = {
            "dataset_size": 1 if method.privacy_unit == WHOLE_SITE else size,
            "sample_rate": method.sample_rate,
            "clip_norm": 1.0,
            "noise_multiplier": method.noise_multiplier,
        }
        return {
            "service": self.url,
            "dataset": name,
            "delta": DELTA,
            "plan": plan,
            "rounds": rounds,
            "classes": int(public[1].max()) + 1,
            "method": self.options.method,
            "local_epochs": LOCAL_EPOCHS,
            "local_steps": method.local_steps,
            "learning_rate": method.learning_rate,
            "side_information": (public[0].square().mean(0).sqrt() + 0.1).tolist(),
        }

    def create_budgets(self) -> None:
        """Create a dataset in the ledger for each site."""
        key = self.processes.environment["ACCOUNTANT_API_KEY"]
        unit = METHODS[self.options.method].privacy_unit
        for name in self.sites:
            settings = json.loads((self.folder / name / "site.json").read_text())
            size = settings["plan"]["dataset_size"]
            budget = {"epsilon": self.epsilons[name], "delta": DELTA}
            create_dataset(self.url, key, budget, name, size, unit)
        print(f"Each of {len(self.sites)} sites may give out ε = {EPSILON:g} at δ = {DELTA:g}")

    def start_link(self) -> None:
        """Start Flower's SuperLink; with its database, it knows its nodes after a restart."""
        port = str(self.ports["link"])
        simulated = ["--simulation"] if self.options.ray else []
        self.processes.start(
            "link", self.programs / "flower-superlink", "--insecure", "--port", port,
            "--database", self.folder / "link.db", "--disable-runtime-dependency-installation",
            *simulated,
        )  # fmt: skip

    def start_sites(self) -> None:
        """Start all sites, unless the SuperLink simulates them."""
        for name in [] if self.options.ray else self.sites:
            self.start_site(name)

    def start_site(self, name: str) -> None:
        """Start a site's SuperNode."""
        self.processes.start(
            name, self.programs / "flower-supernode", "--insecure",
            "--superlink", f"127.0.0.1:{self.ports['link']}", "--port", str(find_free_port()),
            "--node-config", f'folder="{self.folder / name}"',
        )  # fmt: skip

    def submit(self) -> None:
        """Start the training with `flwr run`, or go on with it."""
        self._server_was_seen, self.submitted = False, self.submitted + 1
        home = self.folder / "flower"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "demo"\n\n[superlink.demo]\n'
            f'address = "127.0.0.1:{self.ports["link"]}"\ninsecure = true\n'
        )
        options = self.options
        rate = server_rate(options)
        config = (
            f'folder="{self.folder / "server"}" sites={options.sites} rounds={options.rounds} '
            f"learning-rate={rate} round-seconds={options.round_seconds}"
        )
        command = [self.programs / "flwr", "run", self.app, "demo", "--run-config", config]
        if options.ray:
            command += ["--federation-config", f"num-supernodes={options.sites}"]
        deadline = time.monotonic() + _SUBMIT_SECONDS
        while True:
            done = subprocess.run(
                command, env=self.processes.environment, check=False,
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if not done.returncode:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"flwr run failed for {_SUBMIT_SECONDS:g} seconds, and said: {done.stdout}"
                )
            time.sleep(_POLL_SECONDS)

    def wait_for_round(self, number: int) -> None:
        """Wait until the server has finished a round."""
        self._wait(lambda: len(self.server_rounds()) >= number, f"round {number}")

    def wait_for_end(self) -> None:
        """Wait until the server has written its result."""
        self._wait((self.folder / "server" / "result.json").exists, "the end of the training")

    def _wait(self, is_done: Any, what: str) -> None:
        """Wait until something is done.

        If the server's process ends before, start it again: on a slow machine Flower's SuperLink
        answers with an error when its database is locked for five seconds, and that ends the run.
        Sites that end are started again too.

        Each round that the server has finished is printed, and begins the limit anew.

        Raises:
            TimeoutError: there was no further round within the limit.
        """
        deadline = time.monotonic() + self.options.seconds
        while not is_done():
            if self._print_new_rounds():
                deadline = time.monotonic() + self.options.seconds
            is_running = self._is_server_running()
            if self._server_was_seen and not is_running and not is_done():
                self.submit()
            self._server_was_seen = is_running
            self._restart_ended_sites()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no {what}, and no round within {self.options.seconds:g} s; see {self.folder}"
                )
            time.sleep(_POLL_SECONDS)
        self._print_new_rounds()

    def _print_new_rounds(self) -> bool:
        """Print the rounds finished since the last call; return whether there are any."""
        rounds = self.server_rounds()
        new = rounds[self._rounds_printed :]
        for each in new:
            seconds = time.monotonic() - self._round_began
            print(
                f"round {each['round']} of {self.options.rounds}: {each['contributions']} of "
                f"{self.options.sites} sites contributed, {seconds:.0f} s",
                flush=True,
            )
            self._round_began = time.monotonic()
        self._rounds_printed = len(rounds)
        return bool(new)

    def _restart_ended_sites(self) -> None:
        """Start each site again whose process ended, as when another program took its port."""
        for name in self.sites:
            process = self.processes.running.get(name)  # none if it was killed on purpose
            if process is not None and process.poll() is not None:
                self.start_site(name)

    def _is_server_running(self) -> bool:
        """Return whether the process of the server's app runs."""
        alive = [fields for fields in list_processes("pid,stat,comm") if fields[1][0] != "Z"]
        named = {int(pid) for pid, _, name, *_ in alive if name in SERVER_PROCESSES}
        return not named.isdisjoint(descendants_of(self.processes.running["link"].pid))

    def server_rounds(self) -> list[dict[str, Any]]:
        """Return the rounds that the server has finished."""
        return read_lines(self.folder / "server" / "rounds.jsonl")

    def charges(self) -> dict[str, tuple[int, int, int]]:
        """Return, for each site: steps paid for in the ledger, rounds it noted, steps per round."""
        found = {}
        key = self.processes.environment["ACCOUNTANT_API_KEY"]
        with AccountingService(self.url, api_key=key) as service:
            for name in self.sites:
                settings = json.loads((self.folder / name / "site.json").read_text())
                recorded = read_lines(self.folder / name / "rounds.jsonl")
                held = {each["reservation"] for each in recorded}
                charged = sum(service.reservation(each).steps_granted for each in held)
                found[name] = charged, len(recorded), settings["local_steps"]
        return found


def server_rate(options: argparse.Namespace) -> float:
    """Return the server's learning rate: as given, or the method's usual one."""
    given: float | None = options.learning_rate
    return METHODS[options.method].server_rate if given is None else given


def load_data(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return training and test records, with their classes."""
    if options.data != "generated":
        from training_client.lab.data import load  # only for downloaded data

        data = load(options.data, options.data_dir)
        return (data.train_examples, data.train_labels), (data.test_examples, data.test_labels)
    generator = torch.Generator().manual_seed(0)
    size = max(4000, RECORDS_MIN * options.sites)
    examples = torch.randn(size + 1000, 20, generator=generator)
    targets = (examples[:, :3].sum(1) > 0).long()
    return (examples[:size], targets[:size]), (examples[size:], targets[size:])


def write_records(file: Path, examples: torch.Tensor, targets: torch.Tensor) -> None:
    """Write records to a file, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, examples=examples.float().numpy(), targets=targets.long().numpy())


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON documents in a file, one a line; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_records(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records in a file, and their classes."""
    with np.load(file) as saved:
        return torch.from_numpy(saved["examples"]), torch.from_numpy(saved["targets"])


def simulate(folder: Path, rounds: int, learning_rate: float) -> float:
    """Train the sites in a demo's folder in this process; return the test accuracy.

    The ledger is not involved, so that its charges are those of the demo itself.
    """
    public, targets = read_records(folder / "server" / "public.npz")
    model = nn.Linear(public.shape[1], int(targets.max()) + 1)
    for each in model.parameters():
        nn.init.zeros_(each)
    sites = [simulated_site(each.parent, model) for each in sorted(folder.glob("*/site.json"))]
    train_federated(model, sites, cross_entropy, learning_rate=learning_rate, rounds_max=rounds)
    with torch.no_grad():
        return float((model(public).argmax(1) == targets).float().mean())


def simulated_site(home: Path, model: nn.Module) -> Contributor:
    """Return the participant that a site's folder describes, with its number of rounds."""
    settings = json.loads((home / "site.json").read_text())
    examples, targets = read_records(home / "records.npz")
    steps = settings["local_steps"]
    budget = NoBudget(Plan(**settings["plan"]), settings["rounds"] * steps, "a simulation")
    if settings["method"] == "a-ddp":
        return Participant(home.name, model, examples, targets, budget)
    if settings["method"] == "fedavg":
        return FedAvgParticipant(
            home.name, model, examples, targets, budget,
            learning_rate=settings["learning_rate"], local_epochs=settings["local_epochs"],
        )  # fmt: skip
    scales = torch.tensor(settings["side_information"]).expand(settings["classes"], -1)
    return AdaptiveParticipant(
        home.name, model, examples, targets, budget,
        side_information=[scales, torch.ones(settings["classes"])],
        learning_rate=settings["learning_rate"], local_steps=steps,
    )  # fmt: skip


def print_outcome(federation: Federation) -> int:
    """Print each site's rounds, paid for and noted by the site; return 1 if any differ.

    Of many sites, those with the same rounds are one row.
    """
    charges = federation.charges()
    rows: dict[tuple[str, float, int], int] = {}
    for name, (charged, recorded, steps) in charges.items():
        shown = name if len(charges) <= SITES_SHOWN else "sites"
        row = shown, charged / steps, recorded
        rows[row] = rows.get(row, 0) + 1
    print(f"{'site':10} {'rounds charged':>15} {'rounds recorded':>16}")
    for (name, charged_rounds, recorded), count in rows.items():
        shown = name if name != "sites" else f"{count} site{'s' * (count > 1)}"
        print(f"{shown:10} {charged_rounds:15g} {recorded:16}")
    score = json.loads((federation.folder / "server" / "result.json").read_text())
    print(f"rounds made: {len(federation.server_rounds())}; test accuracy {score['accuracy']:.3f}")
    return int(any(charged != recorded for _, charged, recorded in rows))


def print_simulations(federation: Federation) -> None:
    """Train the same sites in this process as often as asked; print the test accuracies."""
    options = federation.options
    found = [
        f"{simulate(federation.folder, options.rounds, server_rate(options)):.3f}"
        for _ in range(options.simulate)
    ]
    if found:
        print(f"the same sites in one process: test accuracy {', '.join(sorted(found))}")


def main(given: list[str]) -> int:
    """Run the demo; return 0 if every site noted exactly the rounds that it paid for."""
    federation = Federation(parse_arguments(given))
    signal.signal(signal.SIGTERM, interrupt)
    try:
        federation.start_service()
        federation.divide_data()
        federation.create_budgets()
        federation.start_link()
        federation.start_sites()
        federation.submit()
        federation.wait_for_end()
        code = print_outcome(federation)
        print_simulations(federation)
        return code
    except KeyboardInterrupt:
        print("Interrupted. Run it again to begin anew")
        return INTERRUPTED
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C would leave processes
            signal.signal(each, signal.SIG_IGN)
        federation.processes.stop_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
