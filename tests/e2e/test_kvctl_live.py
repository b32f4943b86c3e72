"""`kvctl report --serve` over a real daemon: the page is its user's alone, and keeps itself up to date in a browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPMessage

import numpy as np
import pytest

from kvctl.main import main
from tests.reference.browser import Browser, real_browser
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
SHARED = 4  # blocks that both branches of the tree have before them


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Two conversations behind one prefix, and a client with a hostile name that missed three blocks."""
    with running_daemon() as running:
        with running.connect() as session:
            for number in (1, 2):
                put_branch(running, number)
            assert session.lookup(tokens_of(1, SHARED)).blocks == SHARED
        with running.connect(client_name="<b onclick=x()>&") as session:
            session.lookup(tokens_of(9, 3))
        yield running


def put_branch(daemon: RunningDaemon, number: int) -> None:
    tokens = np.concatenate([tokens_of(1, SHARED), tokens_of(10 + number, 2)])
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(1, SHARED + 2, MODEL), wait="settled")


@contextmanager
def served(daemon: RunningDaemon) -> Iterator[str]:
    """Yield the address that `kvctl report --serve` prints; an interruption ends it in order."""
    command = [sys.executable, "-m", "kvctl.main", "--socket-dir", str(daemon.socket_dir), "report", "--serve"]
    # A job in the background of a script ignores SIGINT, and hands that on.
    process = subprocess.Popen(["env", "--default-signal=INT", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in said
    finally:
        process.kill()
        process.wait()


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, HTTPMessage, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=30) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.mark.slow
def test_the_page_is_for_who_has_its_address_on_this_machine(daemon: RunningDaemon) -> None:
    with served(daemon) as url:
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w-]{20,}/", url)
        assert port is not None
        status, headers, text = ask(url)
        assert status == 200 and "Prefixes" in text
        assert ask(url, Host=f"localhost:{port[1]}")[0] == 200
        for host in (f"rebound.example:{port[1]}", "127.0.0.1", f"127.0.0.1.nip.io:{port[1]}", ""):
            status, _, said = ask(url, Host=host)
            assert status == 421 and "kvstored" not in said, host
        for wrong in (f"http://127.0.0.1:{port[1]}/", url[:-2] + "/", url + "x"):
            status, _, said = ask(wrong)
            assert status == 404 and "Prefixes" not in said
        assert ask(url, "POST")[0] == 501
        listening = subprocess.run(["ss", "-Htln", f"sport = :{port[1]}"], capture_output=True, text=True)
        assert listening.returncode or f"127.0.0.1:{port[1]}" in listening.stdout, "loopback alone"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "&lt;b onclick=x()&gt;&amp;" in text and "<b onclick" not in text
        assert not re.findall(r"(?:src|href)=", text)


@pytest.mark.slow
def test_a_daemon_that_is_gone_is_said_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon() as daemon, served(daemon) as url:
        assert "serving" in ask(url)[2]
        daemon.kill9()
        assert eventually(lambda: "no answer" in ask(url)[2])
        assert main(["--socket-dir", str(daemon.socket_dir), "report", "--serve"]) == 3, "nothing to serve"
        daemon.restart()
        assert eventually(lambda: "serving" in ask(url)[2])
    assert "Traceback" not in capsys.readouterr().err


def test_a_taken_port_is_named(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with served(daemon) as url:
        port = url.split(":")[2].split("/")[0]
        assert main(["--socket-dir", str(daemon.socket_dir), "report", "--serve", "--port", port]) == 1
    assert f"cannot listen on port {port}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_browser_shows_what_happens_without_being_asked(daemon: RunningDaemon) -> None:
    with served(daemon) as url, real_browser() as browser:
        browser.open(url)
        text = browser.text()
        for heading in ("Tiers", "Tenants", "Prefixes", "Last misses"):
            assert heading in text
        assert "never stored" in text and "<b onclick=x()>&" in text
        assert browser.run("return document.querySelectorAll('.tree details').length") == 1
        assert browser.run("return document.querySelectorAll('.tree .leaf').length") == 2
        assert browser.run("return getComputedStyle(document.querySelector('.tree b')).borderRadius") == "8px"
        browser.run("document.querySelector('.tree details').open = false; window.same = true")
        put_branch(daemon, 3)
        assert eventually(lambda: browser.run("return document.querySelectorAll('.tree .leaf').length") == 3)
        assert browser.run("return window.same"), "the page was not loaded again"
        assert not browser.run("return document.querySelector('.tree details').open"), "what was folded stays folded"
        assert browser.log() == [], "its own policy forbids nothing that it does"
        assert_nothing_else_runs(browser)


def assert_nothing_else_runs(browser: Browser) -> None:
    browser.run(
        "const made = document.createElement('script'); made.textContent = 'window.evil = 1';"
        "document.body.append(made); const image = document.createElement('img');"
        "image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image);"
    )
    assert browser.run("return window.evil") is None
    assert eventually(lambda: sum("Content Security Policy" in line for line in browser.log()) >= 1)
