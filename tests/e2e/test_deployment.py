"""The files in deploy/ work: a proxy with TLS in front of the service, and the unit of systemd."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.databases import free_port
from tests.support.pages import ROOT, end
from tests.support.server import Server

pytestmark = pytest.mark.slow
DEPLOY = ROOT / "deploy"
PROGRAM = Path(sys.executable).with_name("accountant")


def require(program: str) -> str:
    """Return a program's path; skip the test where it is not installed."""
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/bin:/usr/local/bin")
    if found is None:
        pytest.skip(f"no {program} on this machine")
    return found


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = require("systemd-analyze")
    unit = (DEPLOY / "accountant.service").read_text()
    assert "/opt/accountant/bin/accountant serve" in unit
    file = tmp_path / "accountant.service"
    file.write_text(unit.replace("/opt/accountant/bin/accountant", str(PROGRAM)))
    done = subprocess.run(
        [program, "verify", "--man=no", file], check=False, capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "accountant.service" in line]
    assert ours == []


def test_nginx_serves_it_over_tls_and_tells_the_clients_address(tmp_path: Path) -> None:
    nginx = require("nginx")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [require("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    outer = free_port()
    url = f"sqlite:///{tmp_path}/ledger.db"
    server = Server(url, tmp_path, ACCOUNTANT_TRUSTED_PROXIES="127.0.0.1")
    text = (DEPLOY / "nginx.conf").read_text()
    for word, other in (
        ("listen 443 ssl", f"listen 127.0.0.1:{outer} ssl"),
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
        ("accountant.example.org", "localhost"),
        ("/etc/ssl/accountant.pem", str(certificate)),
        ("/etc/ssl/accountant.key", str(key)),
    ):
        assert word in text
        text = text.replace(word, other)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/errors; daemon off;\n"
        f"events {{}}\nhttp {{ access_log off; client_body_temp_path {tmp_path}/body;\n"
        f"proxy_temp_path {tmp_path}/proxy; fastcgi_temp_path {tmp_path}/f;\n"
        f"uwsgi_temp_path {tmp_path}/u; scgi_temp_path {tmp_path}/s;\n{text}}}\n"
    )
    proxy = subprocess.Popen([nginx, "-c", tmp_path / "nginx.conf"], start_new_session=True)
    try:
        server.wait()
        asked = urllib.request.Request(
            f"https://localhost:{outer}/", headers={"X-Forwarded-For": "192.0.2.1"}
        )
        trusted = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(asked, context=trusted, timeout=20) as page:
            assert b"Privacy accountant" in page.read()
    finally:
        end(proxy)
        server.stop()
    assert not (tmp_path / "errors").read_text()
