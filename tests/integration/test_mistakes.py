"""Mistakes on the command line: each message names the mistake and the way out."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import ssl
import struct
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

import accountant_service
from accountant_service import cli
from accountant_service.cli import opening
from accountant_service.cli.access import ServiceAccess
from accountant_service.errors import InvalidArgumentError
from accountant_service.ledger.errors import DatabaseAwayError
from training_client.lab import cli as training

CERTIFICATE = (
    Path(__file__).parents[1] / "contract/fixtures/certificates/certificate-3-stopped.json"
)
RUN = "-q 0.01 -s 1.1 -t 100 -d 1e-5"


class Mistake(NamedTuple):
    """A command with a mistake, what its message must say, and variables of the environment."""

    command: str
    says: tuple[str, ...]
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


MISTAKES = [
    Mistake("epsilon", ("--noise-multiplier is required", "--delta is required", "--sample-rate")),
    Mistake("epsilon -q 150% -s 1 -t 9 -d 1e-5", ("--sample-rate must be 0, or", "not 1.5")),
    Mistake("epsilon -q 1/0 -s 1 -t 9 -d 1e-5", ("--sample-rate must be 0, or", "not '1/0'")),
    Mistake("epsilon -q 0,01 -s 1 -t 9 -d 1e-5", ("not '0,01': write 0.01, with a decimal point",)),
    Mistake(
        "epsilon -n 60,000 -b 6k -s 1 -t 9 -d 1e-5",
        ("not '6k': write 6000", "not '60,000': write 60000, without commas"),
    ),
    Mistake(
        "epsilon -q 10 -s 1 -t 9 -d 1e-5",
        ("not 10: write 0.1 for 10 %, or give --batch-size and --dataset-size",),
    ),
    Mistake("epsilon -q 256 -s 1 -t 9 -d 1e-5", ("not 256: give --batch-size and --dataset-size",)),
    Mistake("noise-multiplier -q .01 -t 9 -e 2 -d 1e-5", ("--epochs is -e: for ε, write -E",)),
    Mistake("delta -q .01 -s 1.1 -t 9 -e 2", ("--epochs is -e: for ε, write -E",)),
    *(
        Mistake(f"{command} -e 2", ("No such option: -e. Did you mean -E, --epsilon?",))
        for command in ("steps -q .01 -s 1 -d 1e-5", "sample-rate -t 9 -s 1 -d 1e-5", "solve")
    ),
    Mistake("plan -e 2 -d 1e-5 -n 6000", ("--epsilon is required", "for ε, write -E")),
    Mistake("delta -q .01 -s 1 -t 9 -d 1e-5", ("No such option: -d: this command computes it",)),
    Mistake("steps -q .01 -t 9 -E 2 -d 1e-5", ("No such option: -t: this command computes it",)),
    Mistake(f"epsilon {RUN} --sigma 2", ("--sigma. Did you mean --noise-multiplier? Try: ",)),
    Mistake(f"epsilon {RUN} --method rdp", ("not 'rdp': did you mean subsampled_rdp?",)),
    Mistake(f"epsilon {RUN} --method prv", ("not 'prv': did you mean pld?",)),
    Mistake(f"epsilon {RUN} --method gdp", ("not 'gdp': did you mean gdp_clt?",)),
    Mistake(f"epsilon {RUN} --sampling shuffle", ("did you mean shuffled?",)),
    Mistake(
        f"epsilon {RUN} --neighbouring-relation add_remove", ("did you mean add_or_remove_one?",)
    ),
    Mistake("plan -E 2 -d 1e-5 -n 60000 -e 2 --sampling bins", ("did you mean balls_in_bins?",)),
    Mistake("keys create --scope admn", ("did you mean admin?",)),
    Mistake("epsilon --q .01", ("No such option: --q. Did you mean --sample-rate? Try: ",)),
    Mistake(f"epsilon {RUN} --json=yes", ("'--json' does not take a value",)),
    Mistake(f"epsilon {RUN} --method", ("'--method' requires an argument",)),
    Mistake("epsilon -q .01 -s 1 -t 1e99 -d 1e-5", ("--steps must be a whole number", "1e99")),
    Mistake("delta -q .01 -s 1 -t 9 -E inf", ("--epsilon must be a finite number, not inf",)),
    Mistake("noise-multiplier -q .01 -t 9 -E 2", ("--delta is required with --epsilon",)),
    Mistake("help nothing", ("No such command 'nothing'. Try: accountant -h",)),
    Mistake("dataset create 'a b' -n 100 -E 1 -d 1e-5", ("NAME must begin with a letter",)),
    Mistake("dataset create p -n 100 -E 200 -d .5", ("ε = 200 is above 20", "--accept-weak")),
    Mistake("epsilon -q .01 -s nan -t 9 -d 1e-5", ("--noise-multiplier must be", "not nan")),
    Mistake(f"epsilom {RUN}", ("No such command 'epsilom'. Did you mean 'epsilon'?",)),
    Mistake(f"epsilon {RUN} --bach-size 3", ("No such option", "--batch-size")),
    Mistake(
        "plan -E x -d 2 -n 9.5 -e 5 -b 0 --points 1 --sampling some",
        (
            "--epsilon must be a valid number, not 'x'",
            "--delta must be < 1, not 2",
            "--dataset-size must be a valid integer, not 9.5",
            "--batch-size must be",
            "--points must be ≥ 2, not 1",
            "--sampling must be",
        ),
    ),
    Mistake("import none.json", ("FILE cannot be read", "none.json")),
    Mistake("import text.txt -d x", ("--delta must be a valid number, not 'x'",)),
    Mistake("epsilon -q .01 -s 1 -t 9 -d 10^-5", ("not '10^-5': write 1e-5",)),
    Mistake("epsilon -q .01 -s 1 -t 9 -d 1e5", ("not 100000: did you mean 1e-5?",)),
    Mistake("epsilon -q .01 -s σ=1.1 -t 9 -d 1e-5", ("not 'σ=1.1': write 1.1 alone",)),
    Mistake(f"epsilon {RUN} -E 2", ("No such option: -E: this command computes it",)),
    Mistake("epsilon --std 1 -q .01 -t 9 -d .1", ("Did you mean --noise-multiplier?",)),
    Mistake("epsilon --lr .1 -q .1", ("no learning rate affects ε; accountant-train has it",)),
    Mistake("epsilon --max-grad-norm 1", ("no clip norm affects ε, as noise is relative to it",)),
    Mistake("epsilon --lot-size 600 -n 60000", ("Did you mean --batch-size?",)),
    Mistake("epsilon --rounds 600 -q .1", ("Did you mean --steps?",)),
    Mistake(f"epsilon {RUN} --sampling random", ("did you mean poisson?",)),
    Mistake("noise-multiplier -q .01 -t 9 --attack-success 60", ("not 60: write 0.6 for 60 %",)),
    Mistake("noise-multiplier -q .01 -t 9 --advantage 5", ("not 5: write 0.05 for 5 %",)),
    Mistake("noise -q .01 -t 9 -E 1 -d 1e-5", ("Did you mean 'noise-multiplier'?",)),
    Mistake("sigma -q .01 -t 9 -E 1 -d 1e-5", ("Did you mean 'noise-multiplier'?",)),
    Mistake("eps -q .01 -t 9 -s 1 -d 1e-5", ("Did you mean 'epsilon'?",)),
    Mistake("train --data mnist", ("program of its own: accountant-train run",)),
    Mistake("start", ("Did you mean 'serve'?",)),
    Mistake("--install-completion zsh", ("takes no value", "call it from zsh")),
    Mistake("login", ("ACCOUNTANT_API_KEY to your key",)),
    Mistake("init", ("`accountant dataset create` or `accountant serve` makes the ledger",)),
    # other runs and mechanisms
    Mistake("epsilon -m '[1, 2]' -d 1e-5", ("--mechanism must be an object, not 1. Give",)),
    Mistake("epsilon -m laplace -d 1e-5", ('For a kind write \'{"kind": "laplace", …}\'',)),
    Mistake("epsilon -m certificate.json -d 1e-5", ("For the file write @certificate.json",)),
    Mistake("epsilon -m mechanism.json -d 1e-5", (": 'mechanism.json'. Give an object",)),
    Mistake(
        "epsilon -q .01 -s 1 -t 9 -d 1e-5 --and '-q .01 -s 0 -t 9'",
        ('--noise-multiplier of --and "-q .01 -s 0 -t 9" must be a number ≥ 0.01', "not 0"),
    ),
    Mistake(
        "noise-multiplier -q .01 -t 9 -E 1 -d 1e-5 --and '-s 1 -t 9'",
        ('--and "-s 1 -t 9" must give either --sample-rate, or --dataset-size and --batch-size',),
    ),
    Mistake(
        f"epsilon {RUN} --and '-q .01 --noise 1'",
        ("--and must be the options of a run (-s/--noise-multiplier, ", "no option --noise"),
    ),
    Mistake(f"epsilon {RUN} --and '-q .01 9'", ("--and must be", "'9' belongs to no option")),
    Mistake(f"epsilon {RUN} --and ''", ("--and must be the options of a run", "no option")),
    Mistake(f"epsilon {RUN} --and '-t 5 -t 6'", ("--steps is given twice",)),
    Mistake(
        "epsilon -m {kind:gaussian} -d 1e-5", ("--mechanism is not JSON", '"kind": "gaussian"')
    ),
    Mistake("epsilon -m @none.json -d 1e-5", ("--mechanism cannot read the file 'none.json'",)),
    Mistake(
        """epsilon -m '{"kind":"gaussian","sigma":1}' -d 1e-5""",
        ("--mechanism at /noise_multiplier is required", "/sigma is not a field of gaussian"),
    ),
    # datasets and runs
    Mistake("dataset quote patients -b 9", ("--noise-multiplier is required", "--steps, or")),
    Mistake(
        "dataset quote patients -b 5000 -s 1 -t 9", ("--batch-size must be", "number of records")
    ),
    Mistake("run grant none", ("--steps is required",)),
    Mistake("run commit none --model none.pt", ("--model cannot read the file 'none.pt'",)),
    Mistake("dataset show patient", ("'patient': `accountant dataset list` names all",)),
    Mistake("run grant abc --steps 5", ("'abc': `accountant run list DATASET` names all",)),
    Mistake("series window sales", ("'sales': `accountant series list` names all",)),
    Mistake("dataset edit patients -E 2", ("A budget never changes. For new records",)),
    Mistake("dataset create p -n 9 -E 1 -d .1 --privacy-unit person", ("Did you mean --unit?",)),
    Mistake("run start patients", ("Did you mean 'reserve'?",)),
    Mistake("charge patients --laplace 0", ("--laplace must be a number ≥ 0.01",)),
    Mistake("charge patients --laplace 9 --rho x", ("--rho must be", "not 'x'")),
    Mistake(
        "charge patients --laplace 1000 -o none/a.json",
        ("--output cannot be written, and nothing is charged: no folder 'none'",),
    ),
    Mistake("db backup none/copy.db", ("there is no folder 'none': create it first",)),
    # reports and certificates
    Mistake("report none.json", ("cannot read the file 'none.json'",)),
    Mistake("report text.txt", ("'text.txt' is not a certificate",)),
    Mistake("report dataset patients -o r.docx", ("no format is known for 'r.docx'", ".pdf")),
    Mistake("report dataset patients --tier 4", ("--tier must be a whole number from 1 to 3",)),
    Mistake("verify none.json", ("none.json", "No such file")),
    Mistake("verify certificate.json --model none.pt", ("--model cannot read the file 'none.pt'",)),
    Mistake(
        "verify certificate.json --model text.txt",
        ("it names no model", "when it commits the run", "not valid"),
    ),
    Mistake("ledger verify --file object.json", ("line 1 cannot be read: it has no 'dataset'",)),
    Mistake("verify text.txt --model text.txt", ("it is not a certificate", "not valid")),
    # keys, servers and settings
    Mistake("keys create", ("--scope is required: one of compute, ",)),
    Mistake(
        "keys create --scope compute --expires-in-days nan --requests-per-minute 0.5",
        (
            "--expires-in-days must be a number between 0 and 36500, not nan",
            "--requests-per-minute must be a whole number from 1 to 1000000, not 0.5",
        ),
    ),
    Mistake("keys create --scope run,owner", ("several: --scope run --scope owner",)),
    Mistake("keys create --scope training", ("did you mean run?",)),
    Mistake("keys revoke pa_abc_SECRET", ("IDENTIFIER is the part between", "write abc")),
    Mistake("caps set patients --team a --share 30", ("not 30: write 0.3 for 30 %",)),
    Mistake("webhook add https://a.example --share 50", ("not 50: write 0.5 for 50 %",)),
    Mistake("caps set patients --team a --share 2", ("--share must be a number from 0 to 1, not",)),
    Mistake("caps set --share 1", ("DATASET is required",)),
    Mistake("caps set patients --share 1", ("give one of --team and --key",)),
    Mistake(
        "webhook add https://example.org --share 1 --share half",
        (
            "--share must be a number between 0 and 1, not 1",
            "--share must be a number between 0 and 1, not 'half'",
        ),
    ),
    Mistake(
        "serve --port 99999 --workers 0",
        (
            "--port must be a whole number from 1 to 65535, not 99999",
            "--workers must be a whole number from 1 to 64, not 0",
        ),
    ),
    Mistake("serve --host no.such.host.example", ("Give an address of this machine with --host",)),
    Mistake("serve --host 192.0.2.1", ("Give an address of this machine with --host",)),
    Mistake("serve --port http", ("--port must be a whole number from 1 to 65535, not 'http'",)),
    Mistake("serve now", ("unexpected extra argument", "Try: accountant serve -h")),
    Mistake("--verbose", ("No such option: --verbose", "Try: accountant -h")),
    Mistake(
        "dataset list",
        ("does not answer", "accountant serve", "unset ACCOUNTANT_API_KEY"),
        {"ACCOUNTANT_API_KEY": "pa_x", "ACCOUNTANT_SERVICE": "http://127.0.0.1:9"},
    ),
    Mistake(
        "dataset list",
        ("ACCOUNTANT_SERVICE must be an address such as http://127.0.0.1:8000",),
        {"ACCOUNTANT_API_KEY": "pa_x", "ACCOUNTANT_SERVICE": "localhost:8000"},
    ),
    Mistake(
        "dataset list",
        ("ACCOUNTANT_DATABASE_URL is not the address", "sqlite:////"),
        {"ACCOUNTANT_DATABASE_URL": "ledger.db"},
    ),
    Mistake(
        "dataset list",
        ("there is no ledger in sqlite:////nowhere/x.db", "ACCOUNTANT_DATABASE_URL"),
        {"ACCOUNTANT_DATABASE_URL": "sqlite:////nowhere/x.db"},
    ),
    Mistake(
        "keys create --scope run",
        ("sqlite:////nowhere/x.db cannot be used", "ACCOUNTANT_DATABASE_URL"),
        {"ACCOUNTANT_DATABASE_URL": "sqlite:////nowhere/x.db"},
    ),
    Mistake(
        "dataset list",
        ("ACCOUNTANT_WORKERS must be a whole number, not 'many'",),
        {"ACCOUNTANT_WORKERS": "many"},
    ),
    *(
        Mistake("dataset list", ("ACCOUNTANT_DATABASE_URL", says), {"ACCOUNTANT_DATABASE_URL": url})
        for url, says in (
            ("postgres://user@host/name", "write postgresql+psycopg:// for postgres://"),
            ("mysql://user@host/name", "'mysql' is neither sqlite nor postgresql+psycopg"),
            ("postgresql+nothing://user@host/name", "postgresql+psycopg://user@host/database"),
        )
    ),
    *(
        Mistake("dataset list", says, {"ACCOUNTANT_API_KEY": "pa_x", "ACCOUNTANT_SERVICE": service})
        for service, says in (
            ("http://no.such.host.example", ("There is no such host: correct ACCOUNTANT_SERVICE",)),
            ("http://127.0.0.1:9", ("Start it with `accountant serve`",)),
        )
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ledger that has a dataset, and a text file."""
    found = tmp_path_factory.mktemp("mistakes")
    (found / "text.txt").write_text("no certificate")
    (found / "object.json").write_text("{}")
    shutil.copy(CERTIFICATE, found / "certificate.json")
    url = f"sqlite:///{found}/accountant.db"
    made = invoke("dataset create patients -n 1000 -E 1 -d 1e-5", ACCOUNTANT_DATABASE_URL=url)
    assert made.exit_code == 0, made.output
    return found


def invoke(command: str, **environment: str) -> Result:
    settings = {"COLUMNS": "300", "ACCOUNTANT_API_KEY": ""} | environment
    return CliRunner().invoke(cli.app, shlex.split(command), env=settings, prog_name="accountant")


@pytest.mark.slow
def test_a_mistake_is_named_with_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes that the API refuses as well stand in the table of refusals."""
    monkeypatch.chdir(folder)
    url = {"ACCOUNTANT_DATABASE_URL": f"sqlite:///{folder}/accountant.db"}
    complaints = []
    for mistake in MISTAKES:
        found = invoke(mistake.command, **url | mistake.environment)
        missing = [words for words in mistake.says if words not in found.output]
        not_ours = ("Traceback", "Invalid value", "Usage:", "Missing", "Input should")
        missing += [f"no {words}" for words in not_ours if words in found.output]
        ended = isinstance(found.exception, SystemExit) and found.exit_code in (1, 2)
        if missing or not ended:
            complaints.append((mistake.command, missing, found.exit_code, found.output))
    assert complaints == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run --sigma 1", "No such option: --sigma. Did you mean --noise-multiplier?"),
        ("run -q 1%", "No such option: -q: it is --batch-size over the number of records"),
        ("run --epochs 3", "--epochs: give --steps: epochs times records over --batch-size"),
        ("run --max-grad-norm 1", "Did you mean --clip-norm?"),
        ("run --delta 0,00001", "--delta must be a number, not '0,00001': write 0.00001"),
        ("run --delta=1%", "--delta must be a number, not '1%': write 0.01"),
        ("run --steps ten", "--steps must be an integer, not 'ten'"),
        ("run --steps 1e3", "not '1e3': write 1000"),
        ("run --batch-size 6k", "not '6k': write 6000"),
        ("run --noise-multiplier .001", "must be greater than or equal to 0.01, not '.001'"),
        ("run --sampling shuffle", "must be one of poisson, balls_in_bins, not 'shuffle'"),
        ("run --optimizer sgdd", "Unknown optimizer 'sgdd': did you mean dp_sgd?"),
        ("run --data mnits", "Unknown dataset 'mnits': did you mean mnist?"),
        ("compar", "No such command 'compar'. Did you mean 'compare'?"),
    ],
)
def test_a_mistake_in_training_is_named_with_the_way_out(command: str, says: str) -> None:
    found = CliRunner().invoke(training.app, shlex.split(command), prog_name="accountant-train")
    assert found.exit_code == 2
    assert says in found.output
    assert "Usage:" not in found.output


def test_training_has_a_version_and_help_under_their_other_names() -> None:
    def show(*words: str) -> str:
        return CliRunner().invoke(training.app, list(words), prog_name="accountant-train").stdout

    assert show("-V") == show("version") == show("--version") != ""
    assert show("help", "run") == show("run", "--help") != ""


def test_shares_may_be_percentages_and_fractions() -> None:
    run = "-s 1.1 -t 10 -d 1e-5 --json"
    given = {"1%": "0.01", "0.5 %": "0.005", "1/1000": "0.001", "3/3": "1", "1e−2": "0.01"}
    for text, rate in given.items():
        found = invoke(f"epsilon -q '{text}' {run}")
        assert found.exit_code == 0, found.output
        assert found.stdout == invoke(f"epsilon -q {rate} {run}").stdout


def test_help_and_the_version_are_found_by_their_other_names() -> None:
    assert invoke("help epsilon").stdout == invoke("epsilon --help").stdout
    assert invoke("help").stdout == invoke("--help").stdout
    assert invoke("-V").stdout == invoke("version").stdout == invoke("--version").stdout
    assert "<list[str]>" not in invoke("epsilon --help").stdout + invoke("ledger export -h").stdout


def test_a_rate_of_1_with_little_noise_gets_a_word() -> None:
    assert (
        "-q 1 puts all records into every batch" in invoke("epsilon -q 1 -s .5 -t 9 -d .1").output
    )
    assert "-q 1 puts" not in invoke("epsilon -q 1 -s 50 -t 9 -d .1").output


def test_what_fails_is_told_once_and_nothing_holds() -> None:
    found = invoke(f"epsilon {RUN} --sampling shuffled").stdout
    assert "holds for" not in found
    assert found.count("have the same number of records") == 1


def test_a_service_without_tls_is_told_by_its_error() -> None:
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        port = plain.getsockname()[1]

        def answer() -> None:
            connection, _ = plain.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        service = f"https://127.0.0.1:{port}"
        found = invoke("dataset list", ACCOUNTANT_API_KEY="pa_x", ACCOUNTANT_SERVICE=service)
        thread.join()
    assert (
        f"It may speak plain HTTP: set ACCOUNTANT_SERVICE to http://127.0.0.1:{port}"
        in found.output
    )


@pytest.mark.parametrize("reads", [True, False], ids=["handshake", "reset at once"])
def test_a_service_with_tls_is_told_by_its_error(reads: bool) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]

        def answer() -> None:
            connection, _ = listening.accept()
            if reads:  # and finds no TLS: no certificate is needed for that
                with pytest.raises(ssl.SSLError, match="HTTP_REQUEST"):
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(
                        connection, server_side=True
                    )
            else:
                at_once = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        service = f"http://127.0.0.1:{port}"
        found = invoke("dataset list", ACCOUNTANT_API_KEY="pa_x", ACCOUNTANT_SERVICE=service)
        thread.join()
    assert found.exit_code == 2
    assert f"It may require TLS: set ACCOUNTANT_SERVICE to https://127.0.0.1:{port}" in found.output


def test_a_reset_while_a_request_is_sent_is_told_like_one_after_it() -> None:
    service = ServiceAccess("http://127.0.0.1:1", "pa_x")
    wrapped = URLError(ConnectionResetError(104, "Connection reset by peer"))
    # private: the moment of the reset is the kernel's choice
    assert "It may require TLS" in service._explain(wrapped)


def test_the_reason_why_a_database_takes_no_writes_decides_the_advice() -> None:
    shown = "sqlite:///ledger.db"
    for cause, advice in (
        ("database or disk is full", "Free space on its disk"),
        ("attempt to write a readonly database", "Allow this user to write it"),
        ("database is locked", "Another program holds it"),
        ("connection refused", "start the database"),
    ):
        assert advice in opening._explain(DatabaseAwayError(cause), shown)


def test_a_busy_port_is_told_and_nothing_listens() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        found = invoke(f"serve --port {port}")
    assert found.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in found.output
    assert "choose another with --port" in found.output
    assert "Listening" not in found.output


def test_with_json_a_mistake_is_the_problem_of_the_api() -> None:
    found = invoke("epsilon --json --nothing")
    assert found.exit_code == 2
    assert {"type", "title", "status", "detail", "code"} <= json.loads(found.stdout).keys()
    problem = json.loads(invoke("epsilon -q 2 -t 9 --json").stdout)
    assert [(each["pointer"], each["option"]) for each in problem["errors"]] == [
        ("/mechanism/noise_multiplier", "--noise-multiplier"),
        ("/mechanism/sample_rate", "--sample-rate"),
        ("/delta", "--delta"),
    ]


def test_an_answer_is_shown_in_a_line() -> None:
    run = {"sample_rate": 0.01, "steps": 9}
    one = accountant_service.epsilon(1e-5, noise_multiplier=1, **run)
    assert repr(one) == f"<Guarantee: {one}>"
    assert "\n" not in repr(one)
    several = accountant_service.epsilon(1e-5, noise_multiplier=[1, 2], **run)
    assert str(several).split("\n")[0] == f"noise_multiplier = 1: {one}"
    assert len(str(several).split("\n")) == 2


def test_a_value_in_python_is_named_with_the_way_out() -> None:
    for rate, says in {10: "not 10: write 0.1 for 10 %", "1%": "not '1%': write 0.01"}.items():
        with pytest.raises(InvalidArgumentError, match=says):
            accountant_service.epsilon(1e-5, noise_multiplier=1, sample_rate=rate, steps=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("epsilon(sigma=1.1, delta=1e-5)", "epsilon() got an unexpected .*did you mean noise_mul"),
        ("epsilon(1e-5, noise_multiplier=1, q=.1, steps=9)", "did you mean sample_rate?"),
        ("epsilon(1e-5, 1.1, .01, 100)", "only delta may come without its name; the others are"),
        ("epsilon(1e-5, relation='replace_one')", "did you mean neighbouring_relation?"),
        ("noise_multiplier(1.0, sigma=1)", "noise_multiplier() .*: it computes noise_multiplier"),
    ],
)
def test_a_mistake_in_python_is_named_with_the_way_out(call: str, says: str) -> None:
    names = {name: getattr(accountant_service, name) for name in accountant_service.__all__}
    pattern = says.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
    with pytest.raises(TypeError, match=pattern):
        eval(call, names)


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/v1/epsilon", "does not take this method; it takes POST"),
        ("PATCH", "/v1/datasets/patients", "does not take this method; it takes GET"),
        ("POST", "/epsilon", "/docs lists the API's, which begin with /v1/"),
        ("POST", "/v1/eps", "/docs lists the API's, which begin with /v1/"),
    ],
)
def test_a_mistake_in_a_request_is_named_with_the_way_out(
    api: TestClient, method: str, path: str, says: str
) -> None:
    """Other mistakes in requests, and those in forms, stand in the table of refusals."""
    assert says in api.request(method, path).json()["detail"]
