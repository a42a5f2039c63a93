"use strict";
// The script of a report's page. It inserts texts from the network as text, never as markup. With
// `ast` Vega interprets its expressions, so the page's policy (CSP) can forbid `eval`.
const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
const series = data.series;
const $ = (id) => document.getElementById(id);
const chosen = { zone: "local", theme: "auto", broker: "", topic: "" };
const OUTCOMES = ["stored", "degraded", "not stored", "perhaps stored"];
const SPENT = ["queue", "connect", "broker", "retry", "strict wait"];
const SHARES = ["p50", "p95", "p99", "p99.9"];

function isDark() {
  if (chosen.theme !== "auto") return chosen.theme === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function element(name, text, attributes) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  return made;
}

const many = (n) => Number(n).toLocaleString("en-US", { maximumFractionDigits: 2 });

function when(ms, withDate) {
  const options = {
    hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
    ...(chosen.zone === "utc" ? { timeZone: "UTC" } : {}),
    ...(withDate === false ? {} : { year: "numeric", month: "2-digit", day: "2-digit" }),
  };
  return new Date(ms).toLocaleString("sv-SE", options);
}

const zoneName = () => chosen.zone === "utc"
  ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

// --- tables -------------------------------------------------------------------------------------

// columns: [name, value of a row, kind]; kinds: n number, t time, x long text, b button.
function table(caption, columns, rows) {
  const made = element("table");
  made.append(element("caption", caption));
  const head = element("tr");
  for (const [name, , kind] of columns) {
    head.append(element("th", name, { scope: "col", class: kind === "n" ? "n" : "" }));
  }
  made.append(element("thead"));
  made.tHead.append(head);
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    for (const [, value, kind] of columns) {
      const found = value(row);
      if (found instanceof Node) {
        const cell = element("td");
        cell.append(found);
        line.append(cell);
      } else {
        const shown = kind === "n" && typeof found === "number" ? many(found)
          : kind === "t" && found !== null ? when(found) : found;
        line.append(element("td", shown ?? "-", { class: kind || "" }));
      }
    }
    body.append(line);
  }
  made.append(body);
  const scroll = element("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
  scroll.append(made);
  return scroll;
}

function opener(text, step, broker, error) {
  const button = element("button", text, { type: "button" });
  button.addEventListener("click", () => showBehind(step, broker, error));
  return button;
}

const at = (text) => (text ? Date.parse(text) : null);
const flag = (value) => (value === null ? "-" : value ? "yes" : "NO");

// --- details of a point in a chart --------------------------------------------------------------

function fits(row) {
  return (!chosen.broker || row.broker === chosen.broker) && (!chosen.topic || row.topic === chosen.topic);
}

// The SQL condition that a column has this text, as by `sql.is_text`; safe to paste into a shell.
function isText(column, text) {
  if (/^[\w.-]+$/.test(text)) return `${column} = '${text}'`;
  const digits = [...new TextEncoder().encode(text)].map((b) => b.toString(16).padStart(2, "0"));
  return `hex(${column}) = '${digits.join("").toUpperCase()}'`;
}

function showBehind(step, broker, error) {
  const panel = $("behind");
  const of = (row) => fits(row) && (step === null || row.step === step)
    && (!broker || row.broker === broker) && (!error || row.error === error);
  const attempts = series.failures.filter(of);
  const named = new Set(attempts.map((row) => `${row.query} ${row.epoch}`));
  const behind = series.behind.filter((row) => fits(row) && (step === null || row.step === step)
    && (!broker || row.broker === broker) && (!error || named.has(`${row.query} ${row.epoch}`)));
  const epochs = new Map(series.epochs.map((row) => [`${row.query_id} ${row.epoch}`, row]));
  const parts = [];
  if (step !== null) parts.push(`${when(step * series.step_ms)} to ${when((step + 1) * series.step_ms, false)} ${zoneName()}`);
  if (broker) parts.push(broker);
  if (error) parts.push(error);
  panel.replaceChildren();
  panel.hidden = false;
  panel.append(element("h2", `Behind: ${parts.join(", ") || "all"}`, { tabindex: "-1" }));
  const close = element("button", "Close", { type: "button" });
  close.addEventListener("click", () => { panel.hidden = true; });
  panel.append(close);
  panel.append(table("Epochs: those with failures, and the slowest", [
    ["query", (r) => r.query.slice(0, 8)], ["epoch", (r) => r.epoch, "n"], ["broker", (r) => r.broker],
    ["topic", (r) => r.topic], ["attempts", (r) => r.requests, "n"], ["failed", (r) => r.failed, "n"],
    ["messages", (r) => r.messages, "n"], ["longest ms", (r) => r.longest, "n"],
    ["rows in", (r) => epochs.get(`${r.query} ${r.epoch}`)?.rows_in ?? null, "n"],
    ["dead", (r) => { const e = epochs.get(`${r.query} ${r.epoch}`); return e ? e.dead + e.unknown : null; }, "n"],
    ["adds up", (r) => { const e = epochs.get(`${r.query} ${r.epoch}`); return e ? flag(e.adds_up) : "-"; }],
    ["slowest message id", (r) => r.message_id || "-"],
  ], behind));
  if (attempts.length) {
    panel.append(table("Attempts that failed: the first of each kind", [
      ["at", (r) => r.at, "t"], ["broker", (r) => r.broker], ["topic", (r) => r.topic],
      ["queue", (r) => r.queue, "n"], ["epoch", (r) => r.epoch, "n"], ["partition", (r) => r.partition, "n"],
      ["attempt", (r) => r.attempt, "n"], ["outcome", (r) => r.outcome], ["error", (r) => r.error || "-"],
      ["code", (r) => r.code, "n"], ["ms", (r) => r.rtt, "n"], ["message id", (r) => r.message_id || "-"],
      ["remark", (r) => r.remark || "", "x"],
    ], attempts));
  } else {
    panel.append(element("p", "No attempt failed here.", { class: "none" }));
  }
  const first = behind[0] || attempts[0];
  const where = first ? ` --where "${isText("query_id", first.query)} AND epoch = ${Number(first.epoch)}"` : "";
  const line = element("p", "All attempts, with Spark: ");
  line.append(element("code", `rocket-sink ledger show sends --ledger ${data.quoted}${where} --json`));
  panel.append(line);
  panel.querySelector("h2").focus();
}

// --- charts -------------------------------------------------------------------------------------

function config() {
  const dark = isDark();
  const text = dark ? "#c9d1da" : "#3b434d";
  const line = dark ? "#343b45" : "#dfe3e8";
  return {
    background: null, font: "system-ui, Segoe UI, Roboto, Noto Sans, sans-serif",
    view: { stroke: null },
    axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", labelLimit: 150, labelExpr: "datum.value === 0 ? '0' : datum.label" },
    legend: { labelColor: text, titleColor: text, labelFontSize: 11, titleFontSize: 11, orient: "bottom", titleFontWeight: "normal", symbolType: "square", columns: innerWidth < 500 ? 2 : 5, labelLimit: 130 },
  };
}

function colours() {
  return isDark()
    ? { outcomes: ["#5b9dff", "#e3b341", "#ff6b60", "#c792ea"], spent: ["#e3b341", "#8fd3b6", "#5b9dff", "#ff6b60", "#c792ea"], one: "#5b9dff", isolated: "#ff5a4f", brokers: ["#5b9dff", "#e3b341", "#8fd3b6", "#c792ea", "#ff9e64", "#7fd4e8", "#f28fb1", "#b5bd68"], shares: ["#8fd3b6", "#5b9dff", "#e3b341", "#ff6b60"] }
    : { outcomes: ["#2f6fd0", "#d69e00", "#c62828", "#7b3fa0"], spent: ["#d69e00", "#3d9970", "#2f6fd0", "#c62828", "#7b3fa0"], one: "#2f6fd0", isolated: "#d50000", brokers: ["#2f6fd0", "#d69e00", "#3d9970", "#7b3fa0", "#d2691e", "#1f8fa8", "#b83b75", "#6b7a1f"], shares: ["#3d9970", "#2f6fd0", "#d69e00", "#c62828"] };
}

const firstShown = () => Math.floor(series.first_ms / series.step_ms) * series.step_ms;
const lastShown = () => (Math.floor(series.last_ms / series.step_ms) + 1) * series.step_ms;
const timeScale = () => ({
  type: chosen.zone === "utc" ? "utc" : "time", nice: false,
  // As expressions: a bare number would become datetime(), which is no number without eval.
  domainMin: { expr: String(firstShown()) }, domainMax: { expr: String(lastShown()) },
});

function timeAxis() {
  const days = (lastShown() - firstShown()) / 86400000;
  const format = days > 3 ? "%m-%d" : days > 0.9 ? "%m-%d %H:%M" : days < 0.01 ? "%H:%M:%S" : "%H:%M";
  return { title: null, format, labelOverlap: true, labelFlush: true, tickCount: innerWidth < 500 ? 4 : 9, grid: false };
}

const withTimes = (rows) => rows.map((r) => ({ ...r, from: r.step * series.step_ms, to: (r.step + 1) * series.step_ms, label: when(r.step * series.step_ms) }));

function sums(rows, keys, values) {
  const found = new Map();
  for (const row of rows) {
    const key = keys.map((name) => row[name]).join("\u0001");
    let sum = found.get(key);
    if (!sum) {
      sum = Object.fromEntries([...keys.map((k) => [k, row[k]]), ...values.map((v) => [v, 0])]);
      found.set(key, sum);
    }
    for (const name of values) sum[name] += row[name];
  }
  return [...found.values()];
}

const OUTCOME_OF = { acked: "stored", acked_degraded: "degraded" };

function overTime() {
  const rows = [];
  for (const cell of sums(series.cells.filter((c) => fits(c) && OUTCOME_OF[c.outcome]), ["step", "outcome"], ["messages", "bytes"])) {
    if (cell.messages) rows.push({ step: cell.step, outcome: OUTCOME_OF[cell.outcome], rows: cell.messages, bytes: cell.bytes });
  }
  if (!chosen.broker && !chosen.topic) {
    for (const one of series.letters) {
      if (one.given) rows.push({ step: one.step, outcome: one.reason === "unknown" ? "perhaps stored" : "not stored", rows: one.given, bytes: one.bytes });
    }
  }
  return withTimes(rows);
}

function stacked(values, field, title) {
  return {
    data: { values }, height: 190,
    mark: { type: "bar", strokeWidth: 0 },
    encoding: {
      x: { field: "from", type: "temporal", scale: timeScale(), axis: timeAxis() }, x2: { field: "to" },
      y: { field, type: "quantitative", aggregate: "sum", stack: true, axis: { title, format: "~s", tickCount: 5 } },
      color: { field: "outcome", type: "nominal", scale: { domain: OUTCOMES, range: colours().outcomes }, legend: { title: null } },
      order: { field: "outcome", sort: "descending" },
      detail: [{ field: "step" }],
      tooltip: [{ field: "label", title: "from" }, { field: "outcome" }, { field, type: "quantitative", aggregate: "sum", format: ",", title }],
    },
  };
}

const brokersOf = (rows) => [...new Set(rows.map((r) => r.broker))].sort();

function heatMap(values) {
  const shown = series.isolations.filter((i) => !chosen.broker || i.broker === chosen.broker)
    .map((i) => ({ ...i, until: Math.min(i.until, lastShown()), state: "isolated", label: when(i.since) }))
    .filter((i) => i.since < i.until);
  const names = [...new Set([...brokersOf(values), ...brokersOf(shown)])].sort();
  const y = { field: "broker", type: "nominal", scale: { domain: names, paddingInner: .12 }, axis: { title: null } };
  return {
    height: Math.max(110, names.length * 46),
    layer: [
      { data: { values }, mark: { type: "rect" },
        encoding: {
          x: { field: "from", type: "temporal", scale: timeScale(), axis: timeAxis() }, x2: { field: "to" }, y,
          color: { field: "p99", type: "quantitative", scale: { type: "log", scheme: "viridis", nice: false }, legend: { title: "p99 ms", type: "gradient", gradientLength: 180, format: "~s", tickCount: 4 } },
          tooltip: [{ field: "label", title: "from" }, { field: "broker" }, { field: "p50", title: "p50 ms" }, { field: "p99", title: "p99 ms" }, { field: "longest", title: "longest ms" }, { field: "answers", format: "," }],
        } },
      ...(!shown.length ? [] : [{ data: { values: shown }, mark: { type: "bar", height: 8, opacity: .95, cornerRadius: 2 },
        encoding: {
          x: { field: "since", type: "temporal" }, x2: { field: "until" }, y: { ...y },
          fill: { field: "state", type: "nominal", scale: { domain: ["isolated"], range: [colours().isolated] }, legend: { title: null } },
          tooltip: [{ field: "label", title: "isolated from" }, { field: "broker" }, { field: "topic" }, { field: "cause" }, { field: "reachable" }],
        } }]),
    ],
    ...(shown.length ? { resolve: { scale: { color: "independent", fill: "independent" } } } : {}),
  };
}

function percentiles() {
  const rows = series.latency.filter(fits).flatMap((r) => SHARES.map((share) => ({ of: `${r.broker} ${r.topic}`, broker: r.broker, topic: r.topic, share, ms: r[share], answers: r.answers })));
  const names = [...new Set(rows.map((r) => r.of))];
  return {
    data: { values: rows }, height: Math.max(90, names.length * 26),
    encoding: {
      y: { field: "of", type: "nominal", axis: { title: null, labelLimit: innerWidth < 500 ? 110 : 190 }, sort: names },
      x: { field: "ms", type: "quantitative", scale: { type: "log", nice: true }, axis: { title: "ms", format: "~s", tickCount: 5 } },
    },
    layer: [
      { mark: { type: "line", strokeWidth: 2, color: isDark() ? "#4a5361" : "#c4cad2" }, encoding: { detail: { field: "of" } } },
      { mark: { type: "point", filled: true, size: 70, opacity: 1 },
        encoding: {
          color: { field: "share", type: "nominal", scale: { domain: SHARES, range: colours().shares }, legend: { title: null } },
          tooltip: [{ field: "broker" }, { field: "topic" }, { field: "share" }, { field: "ms", format: ",.1f" }, { field: "answers", format: "," }],
        } },
    ],
  };
}

function timeSpent() {
  const rows = [];
  const names = { queue: "wait_ms", connect: "connect_ms", broker: "broker_ms", retry: "retry_ms", "strict wait": "strict_ms" };
  for (const sum of sums(series.cells.filter(fits), ["broker"], Object.values(names))) {
    for (const part of SPENT) rows.push({ broker: sum.broker, part, seconds: Math.max(0, sum[names[part]]) / 1000, order: SPENT.indexOf(part) });
  }
  return rows;
}

function bars(rows, y, x, more) {
  const names = [...new Set(rows.map((r) => r[y]))];
  return {
    data: { values: rows }, height: Math.max(60, names.length * 28),
    mark: { type: "bar" },
    encoding: {
      y: { field: y, type: "nominal", sort: names, axis: { title: null, labelLimit: innerWidth < 500 ? 120 : 200 } },
      x: { field: x, type: "quantitative", axis: { title: more.title, format: "~s", tickCount: 4 } },
      color: more.color || { value: colours().one },
      ...(more.order ? { order: more.order } : {}),
      tooltip: more.tooltip,
    },
  };
}

function pending() {
  const reasons = [...new Set(series.letters.map((r) => r.reason))].sort();
  const rows = [];
  const changes = new Map(series.letters.map((r) => [`${r.step} ${r.reason}`, r.given - r.settled]));
  const steps = [...new Set(series.letters.map((r) => r.step))].sort((a, b) => a - b);
  const end = Math.floor(series.last_ms / series.step_ms) + 1;
  if (!steps.includes(end)) steps.push(end);
  for (const reason of reasons) {
    let waiting = 0;
    for (const [place, step] of steps.entries()) {
      waiting += changes.get(`${step} ${reason}`) || 0;
      rows.push({ step, reason, waiting, next: steps[place + 1] ?? step + 1 });
    }
  }
  return withTimes(rows).map((r) => ({ ...r, to: r.next * series.step_ms }));
}

function queues() {
  return series.queues.filter(fits).map((r) => ({ ...r, name: `${r.topic}  ${r.broker} ${r.queue}` }))
    .sort((a, b) => a.topic.localeCompare(b.topic) || a.broker.localeCompare(b.broker) || a.queue - b.queue);
}

async function draw(id, spec, rows, columns, caption, click) {
  const chart = $(`${id}-chart`);
  const details = $(`${id}-data`);
  details.replaceChildren(table(caption, columns, rows));
  if (!rows.length) {
    chart.replaceChildren(element("p", "Nothing.", { class: "none" }));
    return;
  }
  if (!window.vegaEmbed) {
    chart.replaceChildren();
    return;
  }
  const whole = { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec };
  const { view } = await vegaEmbed(chart, whole, {
    actions: false, renderer: "svg", ast: true, config: config(),
    tooltip: { theme: isDark() ? "dark" : "light" },
  });
  if (click) view.addEventListener("click", (event, item) => { if (item && item.datum) click(item.datum); });
}

const stepColumn = ["from", (r) => opener(when(r.from), r.step, r.broker || "")];

async function drawAll() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const node of document.querySelectorAll("[data-at]")) {
    node.textContent = when(Date.parse(node.dataset.at));
  }
  for (const node of document.querySelectorAll("[data-zone]")) node.textContent = zoneName();
  if (!series) return;
  const time = overTime();
  const click = (d) => showBehind(d.step ?? stepOf(d.from ?? d.since), d.broker || "");
  const timeColumns = (field) => [stepColumn, ["outcome", (r) => r.outcome], [field, (r) => r[field], "n"]];
  const heat = withTimes(series.heat.filter((r) => !chosen.broker || r.broker === chosen.broker));
  const shares = percentiles();
  const spent = timeSpent();
  const errors = report.errors.map((e) => ({ ...e, name: e.response_code === null ? e.error_code : `${e.error_code} (${e.response_code})` }));
  const retries = report.brokers.filter((b) => b.retries && (!chosen.broker || b.broker === chosen.broker));
  const letters = pending();
  const held = report.waiting.map((w) => ({ ...w, broker: w.broker || "(none named)" }));
  const skew = queues();
  await Promise.all([
    draw("rows", stacked(time, "rows", "rows"), time, timeColumns("rows"), `Rows over time, ${zoneName()}`, click),
    draw("bytes", stacked(time, "bytes", "bytes"), time, timeColumns("bytes"), `Bytes of bodies over time, ${zoneName()}`, click),
    draw("heat", heatMap(heat), heat, [stepColumn, ["broker", (r) => r.broker], ["answers", (r) => r.answers, "n"],
      ["p50 ms", (r) => r.p50, "n"], ["p95 ms", (r) => r.p95, "n"], ["p99 ms", (r) => r.p99, "n"], ["longest ms", (r) => r.longest, "n"]],
      `Latency by broker and time, ${zoneName()}`, click),
    draw("shares", shares, series.latency.filter(fits), [["broker", (r) => opener(r.broker, null, r.broker)], ["topic", (r) => r.topic],
      ["answers", (r) => r.answers, "n"], ...SHARES.map((s) => [`${s} ms`, (r) => r[s], "n"]), ["longest ms", (r) => r.longest, "n"]],
      "Latency by broker and topic", (d) => showBehind(null, d.broker)),
    draw("spent", bars(spent, "broker", "seconds", { title: "seconds, of all requests together", order: { field: "order" },
      color: { field: "part", type: "nominal", scale: { domain: SPENT, range: colours().spent }, legend: { title: null } },
      tooltip: [{ field: "broker" }, { field: "part" }, { field: "seconds", format: ",.1f" }] }),
      spent, [["broker", (r) => opener(r.broker, null, r.broker)], ["part", (r) => r.part], ["seconds", (r) => r.seconds, "n"]],
      "Where the time goes", (d) => showBehind(null, d.broker)),
    draw("errors", bars(errors, "name", "attempts", { title: "failed attempts", tooltip: [{ field: "name", title: "error" }, { field: "attempts", format: "," }, { field: "messages", format: "," }, { field: "example" }] }),
      errors, [["error", (r) => opener(r.name, null, "", r.error_code)], ["attempts", (r) => r.attempts, "n"], ["messages", (r) => r.messages, "n"],
      ["last", (r) => at(r.last_at), "t"], ["example", (r) => r.example, "x"], ["next", (r) => data.advice[r.error_code] || data.advice[""], "x"]],
      "Failures by class", (d) => showBehind(null, "", d.error_code)),
    draw("retries", bars(retries, "broker", "retries", { title: "attempts after the first", tooltip: [{ field: "broker" }, { field: "retries", format: "," }] }),
      retries, [["broker", (r) => opener(r.broker, null, r.broker)], ["retries", (r) => r.retries, "n"]], "Retries by broker", (d) => showBehind(null, d.broker)),
    // An area is one mark, so it could show the numbers of one moment only: each step is a bar.
    draw("letters", { data: { values: letters }, height: 170, mark: { type: "bar", strokeWidth: 0, opacity: .75 },
      encoding: { x: { field: "from", type: "temporal", scale: timeScale(), axis: timeAxis() }, x2: { field: "to" }, y: { field: "waiting", type: "quantitative", stack: true, axis: { title: "letters", tickCount: 4, format: "~s" } },
        color: { field: "reason", type: "nominal", scale: { range: colours().brokers }, legend: { title: null } }, tooltip: [{ field: "label", title: "from" }, { field: "reason" }, { field: "waiting", format: "," }] } },
      letters, [["from", (r) => opener(when(r.from), r.step, "")], ["reason", (r) => r.reason], ["pending", (r) => r.waiting, "n"]],
      `Dead letters pending, ${zoneName()}`, click),
    draw("held", bars(held, "broker", "rows", { title: "rows", tooltip: [{ field: "broker" }, { field: "rows", format: "," }, { field: "keys", format: "," }] }),
      held, [["broker", (r) => opener(r.broker, null, r.broker)], ["rows", (r) => r.rows, "n"], ["keys", (r) => r.keys, "n"], ["oldest", (r) => at(r.oldest), "t"]],
      "Rows held per broker", (d) => showBehind(null, d.broker)),
    draw("queues", bars(skew, "name", "messages", { title: "messages", color: { field: "broker", type: "nominal", scale: { range: colours().brokers }, legend: { title: null } },
      tooltip: [{ field: "topic" }, { field: "name", title: "queue" }, { field: "messages", format: "," }, { field: "requests", format: "," }] }),
      skew, [["topic", (r) => r.topic], ["broker", (r) => opener(r.broker, null, r.broker)], ["queue", (r) => r.queue, "n"], ["messages", (r) => r.messages, "n"], ["requests", (r) => r.requests, "n"]],
      "Messages by queue", (d) => showBehind(null, d.broker)),
  ]);
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
}

const stepOf = (ms) => (ms === undefined ? null : Math.floor(Number(ms) / series.step_ms));

// --- set-up -------------------------------------------------------------------------------------

function fill(id, values, all) {
  const select = $(id);
  select.append(element("option", all, { value: "" }));
  for (const value of values) select.append(element("option", value, { value }));
  select.disabled = values.length < 2;
}

for (const name of ["zone", "theme", "broker", "topic"]) {
  const select = $(name);
  if (!select) continue;
  select.addEventListener("change", () => {
    chosen[name] = select.value;
    $("behind").hidden = true;
    drawAll();
  });
}
if (series) {
  for (const [name, columns] of Object.entries(data.columns)) {
    series[name] = series[name].map((row) => Object.fromEntries(columns.map((column, n) => [
      column, row[n] !== null && data.coded.includes(column) ? series.texts[row[n]] : row[n],
    ])));
  }
  fill("broker", [...new Set(series.cells.map((r) => r.broker))].sort(), "all");
  fill("topic", [...new Set(series.cells.map((r) => r.topic))].sort(), "all");
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (chosen.theme === "auto") drawAll(); });
let narrow = innerWidth < 500;
addEventListener("resize", () => { if ((innerWidth < 500) !== narrow) { narrow = innerWidth < 500; drawAll(); } });
drawAll();
