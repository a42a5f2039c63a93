"""The report's page in a real browser: chromium, driven by chromedriver, without a network."""

import datetime as dt
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from unittest import mock

import pyarrow as pa
import pytest

from rocket_sink.errors import Outcome
from rocket_sink.ledger.records import isolation_rows, send_rows
from rocket_sink.ledger.report import Scope, page, to_html
from rocket_sink.ledger.tune.suggest import tune
from rocket_sink.routing.fault import Isolation
from tests.ledger.views import quick_ledger, report_of

from .night import KILLED, QUERY, START, night, store
from .values import accounts, attempt, context, letter

CHARTS = {"rows", "bytes", "heat", "shares", "spent", "errors", "retries", "letters", "held",
          "queues"}  # fmt: skip
DRAWN = (
    "return [...document.querySelectorAll('figure')].filter((f) => "
    "f.querySelector('svg .role-mark path')).map((f) => f.id)"
)
"""A script that returns the names of the charts that are drawn."""
HOSTILE = (
    '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}'
    "$(touch run)`touch run`' OR \\'1=1"
)
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
    "disable-background-networking", "disable-component-update", "disable-sync",
    "window-size=1280,900",
)  # fmt: skip


class Page:
    """A page in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def show(self, folder, html):
        """Write the page to a file of the folder, and open it."""
        (folder / "page.html").write_text(html, encoding="utf-8")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get((folder / "page.html").as_uri())
        self.await_drawing(1)

    def await_drawing(self, times):
        """Wait until the charts have been drawn as often as that."""
        self.wait(f"return Number(document.documentElement.dataset.drawn || 0) >= {times}")

    def drawings(self):
        return self.run("return Number(document.documentElement.dataset.drawn)")

    def text(self, where):
        """Return the text of the first element that a selector names."""
        return self.run("return document.querySelector(arguments[0]).textContent", where)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script):
        until_s = time.monotonic() + 120
        while not self.run(script):
            assert time.monotonic() < until_s, (script, self.driver.get_log("browser"))
            time.sleep(0.05)

    def choose(self, name, value):
        """Choose a value like a user, and wait until the charts are drawn again."""
        drawn = self.drawings()
        self.run(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))", name, value,
        )  # fmt: skip
        self.await_drawing(drawn + 1)

    def table(self, where):
        """Return a table's rows by the names of the columns."""
        names, rows = self.run(
            "const t = document.querySelector(arguments[0] + ' table');"
            "const text = (row) => [...row.cells].map((c) => c.textContent);"
            "return [text(t.tHead.rows[0]), [...t.tBodies[0].rows].map(text)]", where,
        )  # fmt: skip
        return [dict(zip(names, row, strict=True)) for row in rows]

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self):
        """Return the schemes of all addresses that the page requested."""
        events = (json.loads(one["message"])["message"] for one in
                  self.driver.get_log("performance"))  # fmt: skip
        return {
            event["params"]["request"]["url"].partition(":")[0]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        }


def number(text):
    return float(text.replace(",", ""))


def sums(rows, name, value):
    """Return the sums of a column of a table by the values of another."""
    return sum((Counter({row[name]: number(row[value])}) for row in rows), Counter())


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.fail("these tests need a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Selenium's own manager would look for drivers on the network.
    with mock.patch.dict(os.environ, SE_OFFLINE="true", SE_AVOID_STATS="true"):
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Shanghai"})
        yield Page(driver)
        driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(night(tmp_path_factory.mktemp("page") / "ledger"), series=True)


@pytest.fixture(scope="module")
def html(report):
    return to_html(report)


@pytest.fixture
def shown(browser, html, tmp_path):
    browser.show(tmp_path, html)
    return browser


def test_one_look_names_the_killed_broker(shown, html):
    assert len(html) < 2_000_000
    first = shown.text("#verdict li")
    fact = "broker-b left the route at 2026-03-01 14:15:00 UTC, and nothing was stored there since"
    assert fact in first
    assert "300 rows of 6 keys wait for it" in first and "rocket-sink backfill --ledger" in first
    assert set(shown.run(DRAWN)) == CHARTS
    assert shown.complaints() == []
    # In the heat map broker-b's rows end in the middle, at its isolations.
    heat = shown.table("#heat-data")
    last = max(row["from"] for row in heat if row["broker"] == "broker-b")
    assert last < "2026-03-01 22:15:00" < max(row["from"] for row in heat)


def test_a_notebook_shows_the_page_in_a_frame(browser, report, tmp_path):
    file = tmp_path / "notebook.html"
    file.write_text(f"<meta charset=utf-8><body>{report._repr_html_()}", encoding="utf-8")
    browser.driver.get(file.as_uri())
    browser.driver.switch_to.frame(0)
    browser.await_drawing(1)
    assert set(browser.run(DRAWN)) == CHARTS
    browser.driver.switch_to.default_content()


def test_numbers_are_the_ledgers(shown, report):
    totals = report.totals
    tiles = shown.run(
        "return Object.fromEntries([...document.querySelectorAll('.tiles div')]"
        ".map((d) => [d.id.slice(5), d.querySelector('dd').textContent]))"
    )
    for name in ("rows_in", "acked", "dead", "unknown"):
        assert number(tiles[name]) == getattr(totals, name)
    by_outcome = sums(shown.table("#rows-data"), "outcome", "rows")
    assert by_outcome == {
        "stored": totals.acked, "not stored": totals.dead, "perhaps stored": totals.unknown
    }  # fmt: skip
    stored = {broker.broker: broker for broker in report.brokers}
    queues = sums(shown.table("#queues-data"), "broker", "messages")
    assert queues == {name: broker.messages for name, broker in stored.items()}
    for row in shown.table("#table-brokers"):
        broker = stored[row["broker"]]
        assert number(row["attempts"]) == broker.requests
        assert number(row["p99 ms"]) == pytest.approx(broker.p99_ms, abs=0.06)
    failed = {row["error"]: number(row["attempts"]) for row in shown.table("#errors-data")}
    assert failed == {error.error_code: error.attempts for error in report.errors}
    pending = [row for row in shown.table("#letters-data") if row["reason"] == "held_back"]
    assert number(pending[-1]["pending"]) == 294
    (held,) = shown.table("#held-data")
    assert (held["broker"], held["rows"], held["keys"]) == ("broker-b", "300", "6")
    spent = {(row["broker"], row["part"]): number(row["seconds"]) for row in
             shown.table("#spent-data")}  # fmt: skip
    assert spent["broker-b", "strict wait"] == 24 * 60.0
    assert spent["broker-a", "strict wait"] == 0


def test_the_broker_is_named_when_it_went_before_the_reports_time(report):
    later = Scope(since=KILLED + dt.timedelta(minutes=1))
    [waits] = report_of(report.ledger, later).waiting
    assert (waits.broker, waits.rows, waits.keys) == ("broker-b", 264, 6)


def test_what_if_is_what_tune_says(shown, report):
    quick = quick_ledger(report.ledger)
    assert tune(quick.query, report.ledger, Scope()) == report.tuning
    assert report.tuning.options, "else this test is of less than it could be"
    pasted = shown.text("#what-if pre")
    assert dict(line.split("=", 1) for line in pasted.splitlines()) == report.tuning.options
    assert f"rocket-sink tune {report.ledger} says the same" in shown.text("#what-if")
    # The Tab key reaches everything that can be scrolled or copied.
    reached = "return document.querySelectorAll('#what-if [tabindex=\"0\"]').length"
    assert shown.run(reached) == 3


def test_filters(shown, report):
    shown.choose("broker", "broker-a")
    (broker,) = [candidate for candidate in report.brokers if candidate.broker == "broker-a"]
    assert sum(number(row["rows"]) for row in shown.table("#rows-data")) == broker.messages
    assert {row["broker"] for row in shown.table("#shares-data")} == {"broker-a"}
    both = sum(number(row["messages"]) for row in shown.table("#queues-data"))
    shown.choose("topic", "invoices")
    invoices = shown.table("#queues-data")
    assert {row["topic"] for row in invoices} == {"invoices"}
    assert 0 < sum(number(row["messages"]) for row in invoices) < both
    shown.choose("broker", "")
    shown.choose("topic", "")
    assert {row["broker"] for row in shown.table("#shares-data")} == {
        "broker-a", "broker-b", "broker-c"
    }  # fmt: skip
    assert shown.complaints() == []


def test_a_click_leads_to_the_epochs_and_attempts(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    # The last place of broker-b is the step before 14:15, which is before the kill.
    places = shown.run(
        "return [...document.querySelectorAll('#heat svg .mark-rect path[aria-label]')]"
        ".filter((p) => p.getAttribute('aria-label').includes('broker: broker-c'))"
    )
    ActionChains(shown.driver).move_to_element(places[12]).click().perform()
    shown.wait("return !document.getElementById('behind').hidden")
    title = shown.text("#behind h2")
    assert title.startswith("Behind: 2026-03-01 21:57:00") and title.endswith("broker-c")
    epochs = shown.table("#behind")
    assert {row["broker"] for row in epochs} == {"broker-c"}
    assert {row["query"] for row in epochs} == {QUERY[:8]}
    minute = int((dt.datetime.fromisoformat("2026-03-01T13:57:00+00:00") - START).total_seconds())
    assert {int(row["epoch"]) for row in epochs} <= set(range(minute // 10, minute // 10 + 6))
    command = shown.text("#behind code")
    assert command.startswith("rocket-sink ledger show sends --ledger ") and QUERY in command


def test_each_mark_has_a_tooltip(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    # The largest mark of each kind, because a mark may be narrower than a pixel. The lines between
    # points have no height.
    marks = shown.run(
        "const area = (p) => { const r = p.getBoundingClientRect(); return r.width * r.height; };"
        "return [...document.querySelectorAll('figure svg .role-mark')].map((g) => "
        "[...g.querySelectorAll('path')].sort((a, b) => area(b) - area(a))[0])"
        ".filter((p) => p && area(p)).map((p) => [p.closest('figure').id, p])"
    )
    assert {chart for chart, _ in marks} == CHARTS
    shown.run("window.tip = ''")
    for chart, mark in marks:
        ActionChains(shown.driver).move_to_element(mark).perform()
        shown.wait(
            f"const before = window.tip; // {chart}\n"
            "const e = document.getElementById('vg-tooltip-element');"
            "window.tip = e && e.classList.contains('visible') ? e.textContent : before;"
            "return window.tip !== before"
        )


def test_keyboard_alone(shown):
    from selenium.webdriver.common.keys import Keys

    def press(*keys):
        for key in keys:
            shown.driver.switch_to.active_element.send_keys(key)

    focus = "return [document.activeElement.id, document.activeElement.textContent]"
    press(Keys.TAB)
    assert shown.run(focus)[1] == "To the report"
    press(Keys.TAB)
    assert shown.run(focus)[0] == "zone"
    drawn = shown.drawings()
    press(Keys.ARROW_DOWN)
    shown.await_drawing(drawn + 1)
    assert shown.run("return document.getElementById('zone').value") == "utc"
    shown.run("document.querySelector('#errors summary').focus()")
    press(Keys.ENTER)
    assert shown.run("return document.querySelector('#errors details').open")
    press(Keys.TAB, Keys.TAB)
    assert "INVALID_QUEUE" in shown.run(focus)[1]
    press(Keys.ENTER)
    assert shown.run(focus)[1] == "Behind: INVALID_QUEUE"
    assert "its queue is not in the route" in shown.text("#behind")
    assert shown.complaints() == []


def test_local_zone_and_utc(shown):
    last = "#table-brokers tbody td:last-child time"
    local = dt.datetime.fromisoformat(shown.text(last))
    shown.choose("zone", "utc")
    assert local - dt.datetime.fromisoformat(shown.text(last)) == dt.timedelta(hours=8)
    assert "UTC" in shown.text("#rows-data caption")


def test_phones_and_both_themes(shown):
    def look(width, theme):
        shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500,
        })  # fmt: skip
        shown.choose("theme", theme)
        return shown.run(
            "return [document.documentElement.scrollWidth, "
            "getComputedStyle(document.body).backgroundColor]"
        )

    try:
        assert look(390, "light") == [390, "rgb(255, 255, 255)"]
        assert look(390, "dark") == [390, "rgb(20, 23, 27)"]
        assert look(1280, "light")[0] <= 1280
    finally:
        shown.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_a_screen_reader_needs(shown):
    """Check names of all controls and regions, headings without gaps, and labels of marks."""
    nameless = shown.run(
        "return [...document.querySelectorAll('select, button, figure, [role=region]')]"
        ".filter((e) => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && "
        "!document.getElementById(e.getAttribute('aria-labelledby')) && !e.textContent.trim())"
        ".map((e) => e.outerHTML.slice(0, 100))"
    )
    assert nameless == []
    assert shown.run("return document.querySelectorAll('h1').length") == 1
    assert shown.run("return document.documentElement.lang") == "en"
    marks = shown.run(
        "return [...document.querySelectorAll('#heat svg [role=graphics-symbol]')]"
        ".map((p) => p.getAttribute('aria-label'))"
    )
    assert any("broker: broker-b" in (mark or "") for mark in marks)


def test_hostile_texts_stay_texts(browser, tmp_path):
    ctx = context(query_id=HOSTILE, worker=HOSTILE)
    bad = attempt(
        broker_name=HOSTILE, broker_address=HOSTILE, topic=HOSTILE, outcome=Outcome.UNKNOWN,
        error_code=HOSTILE, remark=HOSTILE, response_code=1, message_id=HOSTILE,
    )  # fmt: skip
    good = attempt(broker_name=HOSTILE, topic=HOSTILE)
    lost = letter(ctx, topic=HOSTILE, sharding_key=pa.array([HOSTILE]), last_error_code=HOSTILE,
                  last_error=HOSTILE, last_broker_name=HOSTILE)  # fmt: skip
    event = isolation_rows([Isolation(HOSTILE, HOSTILE, 1.0, 5.0, 6.0)], ctx, now_s=5.0)
    rows = [send_rows([good, bad], ctx), lost, accounts(ctx, acked=7, dead=1), event]
    ledger = store(tmp_path / "<img src=x onerror=window.hacked=1>", rows)
    browser.show(tmp_path, to_html(report_of(ledger, series=True)))
    assert ledger in browser.text("#what-if code")
    browser.run("document.querySelector('#errors-data td button').click()")
    for name in ("rows", "heat", "queues"):
        assert browser.run(f"return !!document.querySelector('#{name} svg')")
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.images.length") == 0
    assert HOSTILE in browser.text("#behind")
    # A shell runs nothing but the pasted command, and SQL finds this query's rows.
    command = browser.text("#behind code")
    words = subprocess.run(
        ["bash", "-c", f"rocket-sink() {{ printf '%s\\0' \"$@\"; }}; {command}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    assert not (tmp_path / "run").exists()
    quick = quick_ledger(words[words.index("--ledger") + 1])
    where = words[words.index("--where") + 1]
    count = quick.query(f"SELECT count(*) AS n FROM sends WHERE {where}")
    assert count.to_pylist() == [{"n": 2}]
    assert browser.complaints() == []
    assert browser.requested() <= {"file", "data"}


def test_without_the_charts_package_the_tables_are_there(browser, report, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "chart_library", lambda: "")
    browser.show(tmp_path, to_html(report))
    assert "pip install vl-convert-python" in browser.text("body")
    assert len(browser.table("#rows-data")) > 50
    assert browser.complaints() == []


def test_the_policy_forbids_requests(browser, html, tmp_path):
    """Keep requests of a planted image and a planted script inside the page."""
    planted = html.replace(
        "</body>", '<img src="http://127.0.0.1:9/x.png"><script>fetch("http://127.0.0.1:9/y")'
        ".catch(() => {})</script></body>",
    )  # fmt: skip
    browser.show(tmp_path, planted)
    complaints = browser.complaints()
    assert sum("Content Security Policy" in text for text in complaints) >= 2, complaints
