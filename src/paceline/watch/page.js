"use strict";
// The page of `paceline watch`. Everything that is shown comes from /api; the view is kept in the link.

const NUM_COLORS = 12;
const PARTS = ["data", "forward", "backward", "transfer", "waiting", "optimizer", "other"];
const LEVELS = ["debug", "info", "warning", "error"];
const find = (id) => document.getElementById(id);

const state = {
  runs: [], version: -1, events: [], eventsOf: "", colors: new Map(),
  view: { runs: [], curves: ["loss"], focus: "", axis: "step", smooth: 0, log: false, first: null, end: null },
  isChosen: false, curves: new Map(), details: null,
};

// --- the link ---------------------------------------------------------------------------------------------

function readLink() {
  const words = new URLSearchParams(location.hash.slice(1));
  const view = state.view;
  if (words.has("runs")) { view.runs = words.get("runs").split(",").filter(Boolean); state.isChosen = true; }
  if (words.has("curves")) view.curves = words.get("curves").split(",").filter(Boolean);
  for (const name of ["focus", "axis"]) if (words.has(name)) view[name] = words.get(name);
  view.smooth = Number(words.get("smooth") ?? 0) || 0;
  view.log = words.get("log") === "1";
  for (const name of ["first", "end"]) view[name] = words.has(name) ? Number(words.get(name)) : null;
}

function writeLink() {
  const view = state.view, words = new URLSearchParams();
  if (state.isChosen) words.set("runs", view.runs.join(","));
  words.set("curves", view.curves.join(","));
  if (view.focus) words.set("focus", view.focus);
  if (view.axis !== "step") words.set("axis", view.axis);
  if (view.smooth) words.set("smooth", view.smooth);
  if (view.log) words.set("log", "1");
  if (view.first !== null) { words.set("first", Math.round(view.first)); words.set("end", Math.round(view.end)); }
  history.replaceState(null, "", location.pathname + location.search + "#" + words);
}

// --- reading ----------------------------------------------------------------------------------------------

async function read(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(20000) });
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}

function query(entries) {
  return entries.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
}

let isReading = false, isStale = false;

async function refresh() {
  if (isReading) { isStale = true; return; }
  isReading = true;
  try {
    const answer = await read("api/runs");
    state.runs = answer.runs;
    choose();
    renderRuns();
    await readCurves();
    renderCharts();
    const focus = state.view.focus;
    state.details = state.runs.some((run) => run.id === focus) ? await read(`api/runs/${focus}`) : null;
    await renderFocus();
  } catch (error) {
    show(false, String(error.message || error));
  } finally {
    isReading = false;
    if (isStale) { isStale = false; refresh(); }
  }
}

function choose() {
  const view = state.view, ids = state.runs.map((run) => run.id);
  if (!state.isChosen) view.runs = ids.slice(0, 8);
  if (!ids.includes(view.focus)) view.focus = view.runs.find((id) => ids.includes(id)) ?? ids[0] ?? "";
  for (const id of ids) if (!state.colors.has(id)) state.colors.set(id, state.colors.size % NUM_COLORS);
}

const shownRuns = () => state.runs.filter((run) => state.view.runs.includes(run.id));

function range() {
  // Zoom is in steps only on the axis of steps; the other axes are cut when they are drawn.
  const { first, end, axis } = state.view;
  return axis === "step" && first !== null ? [["first", Math.max(0, Math.floor(first))], ["end", Math.ceil(end) + 1]] : [];
}

async function readCurves() {
  const runs = shownRuns(), names = state.view.curves;
  if (!runs.length || !names.length) { state.curves = new Map(); return; }
  const points = Math.round(Math.min(800, Math.max(80, 30000 / runs.length)));
  const words = [...runs.map((run) => ["run", run.id]), ...names.map((name) => ["name", name]), ["points", points], ...range()];
  const curves = await read("api/curves?" + query(words));
  state.curves = new Map(curves.map((curve) => [`${curve.run} ${curve.name}`, curve]));
}

// --- the list of runs -------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const number = (value, digits = 4) => (value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString());

// Of a tick: it has to fit beside the chart.
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const short = (name, value) => (name.includes("bytes") ? size(value) : Math.abs(value) < 1e5 ? number(value, 4) : COMPACT.format(value));

function statusOf(run) {
  if (run.is_silent) return ["silent", `silent for ${duration(run.silent_seconds)}`];
  return [run.status, run.read < 1 ? `${run.status}, read ${Math.floor(100 * run.read)} %` : run.status];
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

function renderRuns() {
  const wanted = find("filter").value.toLowerCase();
  const list = find("runs"), focused = document.activeElement?.id;
  const rows = state.runs.filter((run) => `${run.name} ${run.task} ${run.strategy} ${run.status}`.toLowerCase().includes(wanted));
  list.replaceChildren(...rows.map((run) => {
    const [kind, words] = statusOf(run);
    return element("li", { class: run.id === state.view.focus ? "focus" : "" },
      element("span", {}, element("input", {
        type: "checkbox", id: `draw-${run.id}`, checked: state.view.runs.includes(run.id), "aria-label": `Draw ${run.name}`,
        onchange: (event) => toggleRun(run.id, event.target.checked),
      }), " ", element("span", { class: `swatch k${state.colors.get(run.id)}` })),
      element("button", { type: "button", id: `focus-${run.id}`, onclick: () => { state.view.focus = run.id; changed(); } }, run.name),
      element("span", { class: `pill ${kind}` }, words),
      ...(run.alerts.length ? [element("span", { class: "pill silent" }, run.alerts.length > 1 ? `${run.alerts.length} alerts` : run.alerts[0].alert)] : []),
      element("small", {}, `${run.strategy || run.task} · step ${run.steps_done}/${run.num_steps} · loss ${number(run.loss)}`),
      element("progress", { max: Math.max(1, run.num_steps), value: run.steps_done, "aria-label": `Steps of ${run.name}` }));
  }));
  if (focused) document.getElementById(focused)?.focus();
  const count = (status) => state.runs.filter((run) => run.status === status).length;
  find("summary").textContent = `${state.runs.length} runs, ${count("running")} running, ${count("failed") + count("lost")} failed or lost`;
  find("empty").hidden = state.runs.length > 0;
  renderNames();
}

function toggleRun(id, isDrawn) {
  state.isChosen = true;
  state.view.runs = isDrawn ? [...state.view.runs, id] : state.view.runs.filter((other) => other !== id);
  changed();
}

function renderNames() {
  const names = [...new Set(shownRuns().flatMap((run) => run.curves))];
  const list = find("name-list");
  if (list.dataset.names === names.join(" ") + state.view.curves) return;
  list.dataset.names = names.join(" ") + state.view.curves;
  list.replaceChildren(...names.map((name) => element("label", {}, element("input", {
    type: "checkbox", value: name, checked: state.view.curves.includes(name), onchange: (event) => {
      const curves = state.view.curves.filter((other) => other !== name);
      state.view.curves = event.target.checked ? [...curves, name] : curves;
      changed();
    },
  }), name)));
}

// --- charts -----------------------------------------------------------------------------------------------

const charts = new Map();

function renderCharts() {
  const box = find("charts");
  for (const [name, chart] of charts) if (!state.view.curves.includes(name)) { chart.figure.remove(); charts.delete(name); }
  for (const name of state.view.curves) {
    if (!charts.has(name)) {
      charts.set(name, new Chart(name));
      box.append(charts.get(name).figure);
    }
    charts.get(name).draw();
  }
  linkCsv();
}

function linkCsv() {
  const words = [...state.view.runs.map((id) => ["run", id]), ...state.view.curves.map((name) => ["name", name]), ...range()];
  find("csv").href = "api/curve.csv?" + query(words);
}

function smoothed(values, factor) {
  if (!factor) return values;
  // An exponential mean that corrects for its beginning, as Adam does.
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

class Chart {
  constructor(name) {
    this.name = name;
    this.readout = element("span", {});
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": `Curves of ${name}` });
    const save = element("button", { type: "button", title: "Save as PNG", onclick: () => this.save() }, "PNG");
    this.figure = element("figure", { "data-name": name }, element("figcaption", {}, name, this.readout, save), this.canvas);
    this.drag = null;
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = [event.offsetX, event.offsetX]; });
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", () => this.release());
    this.canvas.addEventListener("pointerleave", () => { this.drag = null; this.readout.textContent = ""; this.draw(); });
    this.canvas.addEventListener("dblclick", resetZoom);
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  series() {
    const axis = state.view.axis;
    return shownRuns().flatMap((run) => {
      const curve = state.curves.get(`${run.id} ${this.name}`);
      if (!curve || !curve.steps.length) return [];
      const times = curve.times, start = run.started ?? times[0];
      const xs = axis === "step" ? curve.steps : axis === "time" ? times : times.map((t) => (t === null ? null : (t - start) / 3600));
      const { last, low = last, high = last } = curve; // each interval is one step
      return [{ run, xs, low, high, ys: smoothed(last, state.view.smooth) }];
    });
  }

  draw() {
    const canvas = this.canvas, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    paint.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    const series = this.series(), view = state.view;
    let xs = series.flatMap((one) => [one.xs.find((x) => x !== null), one.xs.findLast((x) => x !== null)]).filter((x) => x !== undefined);
    let [x0, x1] = view.first !== null ? [view.first, view.end] : [Math.min(...xs), Math.max(...xs)];
    if (!xs.length) { [x0, x1] = [0, 1]; }
    if (x1 <= x0) x1 = x0 + 1;
    let y0 = Infinity, y1 = -Infinity;
    for (const one of series) one.xs.forEach((x, i) => {
      if (x === null || x < x0 || x > x1) return;
      for (const y of view.smooth ? [one.ys[i]] : [one.low[i], one.high[i]]) {
        if (y === null || (view.log && y <= 0)) continue;
        y0 = Math.min(y0, y); y1 = Math.max(y1, y);
      }
    });
    if (y0 > y1) { y0 = view.log ? 0.1 : 0; y1 = 1; }
    const isLog = view.log && y0 > 0, scale = (y) => (isLog ? Math.log10(y) : y);
    let [s0, s1] = [scale(y0), scale(y1)];
    const margin = (s1 - s0) * 0.06 || Math.abs(s0) * 0.05 || 0.5;
    s0 -= margin; s1 += margin;
    const left = 58, right = width - 10, top = 8, bottom = height - 24;
    const toX = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
    const toY = (y) => bottom - ((scale(y) - s0) / (s1 - s0)) * (bottom - top);
    this.frame = { x0, x1, left, right, series };
    paint.font = "11.5px system-ui, sans-serif";
    paint.lineWidth = 1;
    paint.textBaseline = "middle";
    for (const tick of ticks(s0, s1, 5)) {
      const y = bottom - ((tick - s0) / (s1 - s0)) * (bottom - top);
      paint.strokeStyle = color("--grid");
      paint.beginPath(); paint.moveTo(left, y); paint.lineTo(right, y); paint.stroke();
      paint.fillStyle = color("--soft"); paint.textAlign = "right";
      paint.fillText(short(this.name, isLog ? 10 ** tick : tick), left - 7, y);
    }
    paint.textAlign = "center"; paint.textBaseline = "alphabetic";
    for (const tick of ticks(x0, x1, width < 420 ? 3 : 6)) {
      paint.fillStyle = color("--soft");
      paint.fillText(this.label(tick), Math.min(right - 14, Math.max(left, toX(tick))), height - 6);
    }
    paint.save();
    paint.beginPath(); paint.rect(left, top - 4, right - left, bottom - top + 8); paint.clip();
    for (const one of series) {
      const tone = color(`--c${state.colors.get(one.run.id)}`);
      this.band(paint, one, toX, toY, tone, isLog);
      this.line(paint, one, toX, toY, tone, isLog);
    }
    if (this.drag) {
      paint.fillStyle = color("--busy"); paint.globalAlpha = 0.15;
      paint.fillRect(Math.min(...this.drag), top, Math.abs(this.drag[1] - this.drag[0]), bottom - top);
    }
    paint.restore();
    const last = series.map((one) => `${one.run.name} ${number(one.ys.findLast((y) => y !== null) ?? null)}`);
    canvas.setAttribute("aria-label", `Curves of ${this.name}. Last values: ${last.slice(0, 8).join("; ")}`);
  }

  band(paint, one, toX, toY, tone, isLog) {
    // Where an interval has many steps, from its smallest to its largest value.
    paint.fillStyle = tone; paint.globalAlpha = state.view.smooth ? 0.1 : 0.22;
    paint.beginPath();
    one.xs.forEach((x, i) => {
      if (x === null || one.low[i] === null || one.low[i] === one.high[i] || (isLog && one.low[i] <= 0)) return;
      const at = toX(x), next = i + 1 < one.xs.length && one.xs[i + 1] !== null ? toX(one.xs[i + 1]) : at + 1;
      paint.rect(at, toY(one.high[i]), Math.max(1, next - at), Math.max(1, toY(one.low[i]) - toY(one.high[i])));
    });
    paint.fill();
    paint.globalAlpha = 1;
  }

  line(paint, one, toX, toY, tone, isLog) {
    paint.strokeStyle = paint.fillStyle = tone; paint.lineWidth = 1.6; paint.lineJoin = "round";
    paint.beginPath();
    let isOpen = false, numDrawn = 0, at = [0, 0];
    one.ys.forEach((y, i) => {
      if (one.xs[i] === null) return;
      if (y === null || (isLog && y <= 0)) { isOpen = false; return; }
      at = [toX(one.xs[i]), toY(y)];
      if (isOpen) paint.lineTo(...at); else paint.moveTo(...at);
      isOpen = true; numDrawn += 1;
    });
    paint.stroke();
    if (numDrawn && numDrawn < 40) one.ys.forEach((y, i) => {
      if (y === null || one.xs[i] === null || (isLog && y <= 0)) return;
      paint.beginPath(); paint.arc(toX(one.xs[i]), toY(y), 2.2, 0, 7); paint.fill();
    });
  }

  label(x) {
    if (state.view.axis !== "time") return number(x, 6);
    return new Date(1000 * x).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  }

  at(offset) {
    const { x0, x1, left, right } = this.frame;
    return x0 + ((offset - left) / (right - left)) * (x1 - x0);
  }

  move(event) {
    if (!this.frame) return;
    if (this.drag) { this.drag[1] = event.offsetX; this.draw(); return; }
    const x = this.at(event.offsetX);
    const words = this.frame.series.slice(0, 6).map((one) => {
      let best = -1;
      one.xs.forEach((other, i) => { if (other !== null && (best < 0 || Math.abs(other - x) < Math.abs(one.xs[best] - x))) best = i; });
      return best < 0 ? "" : `${this.label(one.xs[best])}: ${number(one.ys[best])}`;
    });
    this.readout.textContent = words.join("  ");
  }

  release() {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 6) zoom(this.at(Math.min(...drag)), this.at(Math.max(...drag)));
    else this.draw();
  }

  press(event) {
    if (!this.frame) return;
    const { x0, x1 } = this.frame, width = x1 - x0, middle = (x0 + x1) / 2;
    const moves = {
      ArrowLeft: [x0 - width / 5, x1 - width / 5], ArrowRight: [x0 + width / 5, x1 + width / 5],
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
      "-": [middle - width, middle + width],
    };
    if (event.key === "0" || event.key === "Escape") resetZoom();
    else if (moves[event.key]) zoom(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  save() {
    const copy = element("canvas"), { width, height } = this.canvas;
    copy.width = width; copy.height = height;
    const paint = copy.getContext("2d");
    paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    paint.fillRect(0, 0, width, height);
    paint.drawImage(this.canvas, 0, 0);
    copy.toBlob((blob) => {
      const link = element("a", { href: URL.createObjectURL(blob), download: `${this.name}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high && found.length < 20; i += 1) found.push(i * step);
  return found;
}

function zoom(first, end) { state.view.first = first; state.view.end = end; changed(); }
function resetZoom() { state.view.first = state.view.end = null; changed(); }

// --- one run ----------------------------------------------------------------------------------------------

async function renderFocus() {
  const run = state.details;
  find("run").hidden = !run;
  if (!run) return;
  const [kind, words] = statusOf(run);
  find("run-name").textContent = run.name;
  find("run-status").className = `pill ${kind}`;
  find("run-status").textContent = words;
  find("run-error").hidden = !run.error;
  find("run-error").textContent = run.error ? `rank ${run.error.rank}: ${run.error.text}` : "";
  find("alerts").hidden = !run.alerts.length;
  renderAlertHistory(run);
  find("alerts").replaceChildren(...run.alerts.map((alert) => element("li", { class: alert.severity, title: alert.advice },
    element("strong", {}, alert.alert), ` since step ${alert.step}: ${alert.text}. ${alert.advice}`)));
  const left = run.status === "running" && run.step_seconds ? duration((run.num_steps - run.steps_done) * run.step_seconds) : "–";
  const facts = {
    step: `${run.steps_done} of ${run.num_steps}`, loss: number(run.loss), "samples per second": number(run.samples_per_second),
    "time left": left, strategy: run.strategy || "–", ranks: run.num_ranks, precision: run.precision || "–", host: run.host || "–",
    started: run.started ? new Date(1000 * run.started).toLocaleString() : "–",
    checkpoint: run.checkpoints.length ? `step ${run.checkpoints.at(-1).step}` : "none",
    certificate: run.certificate ? run.certificate.conclusion : "none",
    "damaged lines": run.damaged_lines,
  };
  find("facts").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  renderRanks(run);
  renderHosts(run);
  renderCheckpoints(run);
  await renderEvents(run);
}

const clock = (time) => (time ? new Date(1000 * time).toLocaleTimeString() : "");
const row = (cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell instanceof Node ? cell : String(cell))));

function renderAlertHistory(run) {
  find("alert-history").hidden = !run.alert_history.length;
  find("alert-count").textContent = `Alerts: ${run.alerts.length} firing, ${run.alert_history.filter((one) => one.state === "resolved").length} resolved`;
  find("alert-list").replaceChildren(...run.alert_history.toReversed().map((alert) =>
    element("li", { class: alert.state === "resolved" ? "info" : "warning" },
      element("time", {}, clock(alert.time), " "), `${alert.state} ${alert.alert} at step ${alert.step}: ${alert.text}`)));
}

function renderCheckpoints(run) {
  find("checkpoint-part").hidden = !run.checkpoints.length;
  find("checkpoints").replaceChildren(...run.checkpoints.toReversed().map((one) =>
    element("li", {}, element("time", {}, clock(one.time), " "), `step ${one.step}: ${one.path}`)));
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const power = bytes < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(bytes) / 10)); // also of a negative tick
  return `${number(bytes / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const total = (table = {}) => Object.values(table).reduce((sum, value) => sum + value, 0);
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
const rate = (bytes, seconds) => (seconds > 0 ? `${size(bytes / seconds)}/s` : "–");

function renderHosts(run) {
  find("host-part").hidden = !run.hosts.length;
  find("hosts").tBodies[0].replaceChildren(...run.hosts.map((host) => {
    const { idle = 0, iowait = 0 } = host.cpu_seconds ?? {}, cpu = total(host.cpu_seconds), memory = host.memory_bytes ?? {};
    const missing = host.unavailable ?? {}, gpus = Object.values(host.gpu_utilization ?? {});
    const joules = total(host.energy_joules) + total(host.gpu_energy_joules);
    return row([host.host, percent(cpu - idle - iowait, cpu), percent(memory.total - memory.available, memory.total),
      rate(total(host.network_sent_bytes) + total(host.network_received_bytes), host.seconds),
      rate(total(host.disk_read_bytes) + total(host.disk_written_bytes), host.seconds),
      gpus.length ? gpus.map((part) => percent(part, 1)).join(", ") : `unavailable: ${missing.gpu ?? "no samples"}`,
      joules > 0 && host.seconds > 0 ? `${number(joules / host.seconds, 3)} W` : `unavailable: ${missing.energy ?? "no samples"}`]);
  }));
  const links = run.processes.flatMap((process) => Object.keys(process.link_sent_bytes ?? {}).map((peer) => [process, peer]));
  find("link-part").hidden = !links.length;
  find("links").tBodies[0].replaceChildren(...links.map(([process, peer]) => {
    const trip = process.link_round_trip_seconds?.[peer];
    return row([`${process.rank} to ${peer}`, rate(process.link_sent_bytes[peer], process.seconds),
      rate(process.link_received_bytes?.[peer] ?? 0, process.seconds), process.link_retransmits?.[peer] ?? 0,
      trip === undefined ? "–" : number(1000 * trip, 3)]);
  }));
}

function renderRanks(run) {
  find("legend").replaceChildren(...PARTS.map((part) => element("span", {}, element("i", { class: `swatch p-${part}` }), ` ${part}`)));
  const operations = new Map(run.operations.map((operation) => [operation.rank, operation]));
  const newest = Math.max(...run.ranks.map((rank) => rank.step)), slowest = Math.max(...run.ranks.map((rank) => 1 - rank.shares.waiting));
  const body = find("ranks").tBodies[0];
  const rows = run.ranks.map((rank) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "bar"); svg.setAttribute("viewBox", "0 0 1 1"); svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", PARTS.map((part) => `${part} ${Math.round(100 * rank.shares[part])} %`).join(", "));
    let at = 0;
    for (const part of PARTS) {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [name, value] of Object.entries({ x: at, y: 0, width: rank.shares[part], height: 1, class: `p-${part}` })) bar.setAttribute(name, value);
      svg.append(bar);
      at += rank.shares[part];
    }
    const isLate = rank.step < newest, isSlow = run.ranks.length > 1 && 1 - rank.shares.waiting >= slowest && run.ranks.some((other) => other.shares.waiting > 0.1);
    const problem = run.rank_problems[rank.rank];
    const words = problem ? element("span", { class: "bad" }, problem) : isLate ? `last heard of at step ${rank.step}` : isSlow ? "others wait for it" : "";
    const cells = [rank.rank, svg, number(1000 * rank.round_seconds), number(1000 * rank.slowest_seconds), rank.cpu_cores.toFixed(2),
      number(rank.peak_bytes / 2 ** 20), number(rank.sent_bytes / 1024), words, operationOf(operations.get(rank.rank))];
    operations.delete(rank.rank);
    return [rank.rank, cells];
  });
  // A rank that was lost or hangs before its first window of rounds has no times yet.
  const known = new Set(rows.map(([rank]) => rank)), problems = Object.keys(run.rank_problems).map(Number);
  for (const rank of new Set([...problems, ...operations.keys()])) {
    if (known.has(rank)) continue;
    const problem = run.rank_problems[rank];
    rows.push([rank, [rank, "", "", "", "", "", "", problem ? element("span", { class: "bad" }, problem) : "", operationOf(operations.get(rank))]]);
  }
  body.replaceChildren(...rows.sort((a, b) => a[0] - b[0]).map(([, cells]) => row(cells)));
}

const OPERATION_SECONDS = 2;

function operationOf(operation) {
  if (!operation) return "";
  const seconds = Date.now() / 1000 - operation.since;
  const isLong = operation.alive !== false && seconds >= OPERATION_SECONDS;
  return element("span", { class: operation.alive === false ? "bad" : "" }, operation.text + (isLong ? `, for ${duration(seconds)}` : ""));
}

async function renderEvents(run) {
  if (state.eventsOf !== run.id) { state.events = []; state.eventsOf = run.id; }
  const after = state.events.length ? state.events.at(-1).number : -1;
  if (run.num_events - 1 > after) {
    const events = await read(`api/runs/${run.id}/events?after=${after}`);
    // After a damaged file was replaced, numbers begin again.
    state.events = [...state.events, ...events].slice(-5000);
  } else if (run.num_events - 1 < after) { state.events = []; }
  const level = LEVELS.indexOf(find("level").value), wanted = find("search").value.toLowerCase();
  const rows = state.events.filter((event) => LEVELS.indexOf(event.level ?? "info") >= level)
    .map((event) => [event, `${event.event}: ${fields(event)}`]).filter(([, text]) => text.toLowerCase().includes(wanted));
  find("events").replaceChildren(...rows.slice(-400).reverse().map(([event, text]) => element("li", { class: event.level ?? "info" },
    element("time", {}, event.time ? new Date(1000 * event.time).toLocaleTimeString() : "", " "), text)));
}

function fields(event) {
  const hidden = ["event", "level", "time", "number"];
  return Object.entries(event).filter(([name, value]) => !hidden.includes(name) && (typeof value !== "object" || value === null))
    .map(([name, value]) => `${name} ${typeof value === "number" ? number(value, 6) : value}`).join("  ");
}

// --- start ------------------------------------------------------------------------------------------------

function show(isLive, words) {
  const pill = find("connection");
  pill.className = `pill ${isLive ? "live" : "offline"}`;
  pill.textContent = isLive ? "live" : words;
}

function changed() { writeLink(); linkCsv(); refresh(); }

function listen() {
  const source = new EventSource("api/changes");
  source.onmessage = (event) => {
    show(true);
    if (Number(event.data) !== state.version) { state.version = Number(event.data); refresh(); }
  };
  source.onerror = () => show(false, "disconnected, trying again");
}

readLink();
find("axis").value = state.view.axis;
find("smoothing").value = state.view.smooth;
find("log").checked = state.view.log;
find("filter").addEventListener("input", renderRuns);
find("all").addEventListener("click", () => { state.isChosen = true; state.view.runs = state.runs.map((run) => run.id); changed(); });
find("none").addEventListener("click", () => { state.isChosen = true; state.view.runs = []; changed(); });
find("axis").addEventListener("change", (event) => { state.view.axis = event.target.value; state.view.first = state.view.end = null; changed(); });
find("smoothing").addEventListener("input", (event) => { state.view.smooth = Number(event.target.value); writeLink(); renderCharts(); });
find("log").addEventListener("change", (event) => { state.view.log = event.target.checked; writeLink(); renderCharts(); });
find("reset").addEventListener("click", resetZoom);
for (const name of ["level", "search"]) find(name).addEventListener("input", () => renderFocus());
window.addEventListener("hashchange", () => { readLink(); refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderCharts);
setInterval(renderRuns, 5000); // how long a run has been silent
setInterval(() => { if (state.details) renderRanks(state.details); }, 1000); // and how long a rank has been in one operation
listen();
refresh();
