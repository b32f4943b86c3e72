"""kvctl report --serve: the report as a page on loopback that keeps itself up to date, with the tree and misses.

The page is for the user who started it: its address has a random word, and other words, other hosts in `Host` (a name
that an attacker lets point to this machine) and everything but GET are refused. It loads nothing from elsewhere, and
runs one script, which the policy in the headers names by its hash.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvctl.connection import AdminSocket
from kvctl.output import FAILED, KEY_DIGITS, CommandError, Output
from kvctl.report import charts_of, facts_of, period_of, tenants_of, tiers_of, write_report
from kvctl.snapshot import take_snapshot
from kvstore_console import page as markup
from kvstore_console.page import charts, html_table, section
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds
from kvstore_proto.v1 import admin_pb2 as wire
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

LOOPBACK = "127.0.0.1"
SHOWN_S = 300.0
NODES, MISSES = 100, 40
REFRESH_S = 2.0
MOST_CONNECTIONS = 16  # at once; a further one is closed
REQUEST_S = 10.0  # a connection that sends no request within it is closed
TREE_SHARE = 20  # a tree is asked for anew after this many times the time that it took
_MISSES = (">ago", "tenant", "client", "request", ">found", "missing key", "cause", ">times", "model")
_SCRIPT = """
const again = async () => {
  let main = null;
  try {
    const reply = await fetch(location.href, {cache: "no-store"});
    main = new DOMParser().parseFromString(await reply.text(), "text/html").querySelector("main");
  } catch (error) {}
  document.body.classList.toggle("lost", main === null);
  if (main !== null) {
    for (const old of document.querySelectorAll("details[id]")) {
      const same = main.querySelector("#" + CSS.escape(old.id));
      if (same !== null) same.open = old.open;
    }
    document.querySelector("main").replaceWith(main);
  }
  setTimeout(again, document.hidden ? 10 * REFRESH : REFRESH);
};
setTimeout(again, REFRESH);
""".replace("REFRESH", str(round(REFRESH_S * 1000)))


def report(directory: Path, arguments: argparse.Namespace) -> Output:
    """Write a page about the daemon whose sockets are in `directory`, or serve the live one until the user interrupts.
    Raises CommandError."""
    with AdminSocket(directory, arguments.timeout) as admin:
        if not arguments.serve:
            return write_report(admin, arguments)
        admin.call("Status", wire.StatusRequest(), wire.StatusReply)
    try:
        server = PageServer(LivePage(directory, arguments.timeout), arguments.port)
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(FAILED, f"cannot listen on port {arguments.port}: {reason}; choose another --port") from None
    with server:
        print(f"{server.url}\nfor this user's browser, until Ctrl-C; the address is a secret", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return Output("no more served", {"url": server.url})


class LivePage:
    """The live page about the daemon whose sockets are in `directory`, which is given `timeout_s` seconds to answer.
    Requests for it take turns, and the daemon is asked at most once in half of `REFRESH_S`."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._directory, self._timeout_s = directory, timeout_s
        self._turn = threading.Lock()
        self._html, self._made_s = "", -REFRESH_S
        self._tree, self._tree_due_s = wire.BlockTotalsReply(), 0.0

    def html(self) -> str:
        """Return the page. While the daemon does not answer, it says why not."""
        with self._turn:
            if time.monotonic() - self._made_s >= REFRESH_S / 2:
                try:
                    with AdminSocket(self._directory, self._timeout_s) as admin:
                        self._html = self._document(admin)
                except CommandError as error:
                    self._html = _page("kvstored", "no answer", [markup.warning(str(error))])
                self._made_s = time.monotonic()
            return self._html

    def _document(self, admin: AdminSocket) -> str:
        shot = take_snapshot(admin, since_s=SHOWN_S)
        status, samples = shot.status, shot.samples
        if time.monotonic() >= self._tree_due_s:
            began_s = time.monotonic()
            request = wire.BlockTotalsRequest(by="tree", limit=NODES)
            self._tree = admin.call("BlockTotals", request, wire.BlockTotalsReply)
            self._tree_due_s = time.monotonic() + TREE_SHARE * (time.monotonic() - began_s)
        recent = admin.call("Explain", ExplainRequest(recent_misses=MISSES), ExplainReply)
        body = [markup.tiles(facts_of(shot))]
        body += [markup.warning(f"The daemon warns: {warning}") for warning in status.warnings]
        body += [
            section("Tiers", tiers_of(shot)),
            section("Tenants", tenants_of(shot)),
            section("Prefixes", prefix_tree(self._tree), _tree_note(self._tree)),
            section("Last misses", last_misses(recent)),
            section(period_of(samples), charts(charts_of(samples))),
        ]
        now = time.strftime("%H:%M:%S %Z")
        subtitle = f"{socket.gethostname()}, {now}: {status.state}, up {human_seconds(status.uptime_s)}"
        return _page(f"kvstored {status.version}", subtitle, body)


def _page(title: str, subtitle: str, body: Sequence[str]) -> str:
    return markup.page(title, subtitle, body, f"kvctl report --serve, every {REFRESH_S:g} s.", script=_SCRIPT)


def _tree_note(reply: wire.BlockTotalsReply) -> str:
    most = f"the {human_count(len(reply.totals))} largest of " if reply.groups > len(reply.totals) else ""
    return (
        f"{human_blocks(reply.blocks, reply.payload_bytes)} in {most}{human_count(reply.groups)} runs between the "
        "places where chains part. A prefix is named by its last block, for kvctl explain; its figures include what "
        "continues it."
    )


def prefix_tree(reply: wire.BlockTotalsReply) -> str:
    """Return HTML that shows the nodes in `reply` as a tree that can be folded, the largest branches first."""
    below: dict[str, list[wire.BlockTotal]] = {}
    for total in reply.totals:
        below.setdefault(total.parent, []).append(total)
    return f'<div class="card tree">{_branches(below, "")}</div>' if below else "<p>none</p>"


def _branches(below: dict[str, list[wire.BlockTotal]], key: str) -> str:
    return "".join(_branch(below, total, key == "") for total in below.get(key, ()))


def _branch(below: dict[str, list[wire.BlockTotal]], total: wire.BlockTotal, is_top: bool) -> str:
    tiers = ", ".join(f"{tier} {human_bytes(total.tier_bytes[tier])}" for tier in sorted(total.tier_bytes))
    hidden = total.branches - len(below.get(total.key, ()))
    facts = [
        human_blocks(total.blocks, total.payload_bytes), tiers, f"{human_count(total.accesses)} uses",
        f"idle {human_seconds(total.idle_s)}", f"{human_count(total.branches)} branches" if total.branches else "",
        f"{human_count(hidden)} not shown" if hidden else "", f"{total.tenant}, {total.fingerprint}" if is_top else "",
    ]  # fmt: skip
    kind = total.residency if total.residency in ("hot", "warm", "cold") else "cold"
    line = (
        f'<b class="{kind}">{kind}</b> <code>{escape(total.key[:KEY_DIGITS])}</code> '
        f"{human_count(total.own_blocks)} blocks <small>{escape('; '.join(filter(None, facts)))}</small>"
    )
    inner = _branches(below, total.key)
    if not inner:
        return f'<p class="leaf">{line}</p>'
    return f'<details id="p{escape(total.key)}"{" open" * is_top}><summary>{line}</summary>{inner}</details>'


def last_misses(reply: ExplainReply) -> str:
    """Return HTML with a table of the misses in `reply`, the newest first."""
    rows = [
        [
            human_seconds(miss.ago_s), miss.tenant, f"{miss.client} ({miss.pid})" if miss.pid else miss.client,
            miss.request, f"{human_count(miss.found_blocks)} of {human_count(miss.asked_blocks)}",
            miss.key[:KEY_DIGITS], miss.cause.replace("_", " "), human_count(miss.times), miss.fingerprint,
        ]
        for miss in reply.misses
    ]  # fmt: skip
    return html_table(_MISSES, rows)


class PageServer(ThreadingHTTPServer):
    """An HTTP server on loopback that answers GET of one secret path with `page`. With `port` 0 the system chooses.
    Raises OSError."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int) -> None:
        self.word = secrets.token_urlsafe(16)
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)  # each has a thread for REQUEST_S at most
        super().__init__((LOOPBACK, port), partial(_Handler, page))
        port = self.server_address[1]
        self.hosts = {f"{host}:{port}" for host in (LOOPBACK, "localhost")}
        self.url = f"http://{LOOPBACK}:{port}/{self.word}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = REQUEST_S

    def __init__(self, page: LivePage, *address: object) -> None:
        self._page = page
        super().__init__(*address)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "this page is served on loopback alone\n", "text/plain")
        elif not secrets.compare_digest(self.path.encode(), f"/{self.server.word}/".encode()):
            self._answer(HTTPStatus.NOT_FOUND, "the address that kvctl printed has a word more\n", "text/plain")
        else:
            self._answer(HTTPStatus.OK, self._page.html(), "text/html")

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Content-Security-Policy": markup.content_policy(_SCRIPT), "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "kvctl"

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: requests of the user's own browser."""
