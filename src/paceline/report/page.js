// Values under the pointer; and charts that are drawn anew: zoomed, over another axis, smoothed, without some runs.
"use strict";
(() => {
  const element = (name, text, parent, color) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (color) made.style.background = `var(--${color})`;
    if (parent) parent.append(made);
    return made;
  };

  const tip = element("div", "", document.body);
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");

  const place = (x, y) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = x + 16 + box.width < innerWidth;
    tip.style.left = `${Math.max(8, right ? x + 16 : x - 16 - box.width)}px`;
    tip.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - box.height - 8))}px`;
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  // -- what is shown: the same for all charts of a page ------------------------------------------------------

  const area = document.querySelector(".charts");
  const runs = area ? JSON.parse(area.dataset.runs) : [];
  const shown = { axis: "step", smooth: null, from: null, to: null, hidden: new Set() };

  // The value of an axis after a number of steps of a run: along a line between two that are known.
  const along = (run, step) => {
    const { step: steps, [shown.axis]: values } = runs[run];
    if (shown.axis === "step") return step;
    const at = steps.findIndex((s) => s >= step);
    if (at <= 0) return at === 0 ? values[0] : values.at(-1);
    const share = (step - steps[at - 1]) / (steps[at] - steps[at - 1]);
    return values[at - 1] + share * (values[at] - values[at - 1]);
  };

  const spell = (value, digits = 3) => {
    if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(digits - 2);
    return (+value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
  };
  // With as many digits as tell the values apart: a narrow range needs more than three.
  const spellAll = (values) => {
    for (let digits = 3; ; digits += 1) {
      const texts = values.map((value) => spell(value, digits));
      if (new Set(texts).size === values.length || digits === 12) return texts;
    }
  };
  const spellBytes = (value) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${+value.toPrecision(3)} ${units[unit]}`;
  };
  const spellAxis = (value) => {
    if (shown.axis === "bytes") return spellBytes(value);
    if (shown.axis !== "seconds") return Math.round(value).toLocaleString("en");
    if (value < 60) return `${+value.toPrecision(3)} s`;
    const minutes = Math.floor(value / 60), seconds = Math.round(value % 60);
    return `${minutes} min${seconds ? ` ${seconds} s` : ""}`;
  };

  const ticks = (low, high, about) => {
    const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) found.push(i * step + 0); // + 0: not -0
    return found;
  };
  const decades = (low, high) => {
    const found = [];
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const factors = last - first <= 3 ? [1, 2, 5] : [1];
    for (let e = first; e <= last; e += 1) for (const f of factors) found.push(f * 10 ** e);
    return found.filter((v) => v >= low && v <= high);
  };

  // The mean over a share of the points around each, the missing ones left out.
  const smoothed = (points, share) => {
    const finite = points.filter(([, y]) => y !== null), half = Math.floor(finite.length * share / 2);
    const sums = [0];
    for (const [, y] of finite) sums.push(sums.at(-1) + y);
    return finite.map(([x], i) => {
      const first = Math.max(0, i - half), end = Math.min(finite.length, i + half + 1);
      return [x, (sums[end] - sums[first]) / (end - first)];
    });
  };

  const SIDE = 1000, MARGIN = 0.06, LARGE_DOTS = 24, SMOOTH = 1 / 40;

  class Chart {
    constructor(plot) {
      this.plot = plot;
      this.svg = plot.querySelector("svg");
      this.curves = JSON.parse(plot.dataset.chart);
      this.frame = JSON.parse(plot.dataset.frame);
      this.hair = element("div");
      this.hair.className = "hair";
      this.spots = this.curves.map((curve) => {
        const spot = element("div", "", null, curve.color);
        spot.className = "spot";
        return spot;
      });
    }

    get visible() { return this.curves.filter((curve) => !shown.hidden.has(curve.color)); }

    // Measure the ranges, then draw grid, marks, curves and labels into the same places as the page came with.
    draw() {
      const points = new Map(this.visible.map((c) => [c, c.step.map((s, i) => [along(c.run, s), c.value[i]])]));
      const xs = [...points.values()].flat().map(([x]) => x);
      this.low = shown.from ?? Math.min(...xs);
      this.high = shown.to ?? Math.max(...xs);
      if (!(this.high > this.low)) this.low = Math.min(0, this.high - 1);
      this.across = (x) => (x - this.low) / (this.high - this.low);
      const inside = [...points.values()].flat().filter(([x, y]) => y !== null && x >= this.low && x <= this.high);
      this.scale(inside.map(([, y]) => y));
      this.svg.replaceChildren();
      for (const y of this.levels) this.path([[0, this.up(y)], [1, this.up(y)]], "grid");
      for (const [step, text] of this.frame.marks) this.mark(this.across(along(0, step)), text);
      for (const [curve, all] of points) this.line(curve, all);
      for (const curve of this.curves) {
        curve.x = curve.step.map((s) => this.across(along(curve.run, s)));
        curve.y = curve.value.map((v) => (v === null ? null : this.up(v)));
      }
      this.labels();
    }

    scale(values) {
      let low = Math.min(...values), high = Math.max(...values);
      if (!values.length) [low, high] = [0, 1];
      if (this.frame.log) {
        const margin = Math.max(high / low, 1.01) ** MARGIN;
        const [a, b] = [Math.log(low / margin), Math.log(high * margin)];
        this.up = (v) => (Math.log(v) - a) / (b - a);
        const found = decades(low / margin, high * margin);
        this.levels = found.length > 1 ? found : ticks(low / margin, high * margin, 5);
        return;
      }
      if (this.frame.zero) low = Math.min(0, low);
      const spread = (high - low) || Math.abs(high) || 1;
      const bottom = this.frame.zero && low === 0 ? 0 : low - MARGIN * spread, top = high + MARGIN * spread;
      this.up = (v) => (v - bottom) / (top - bottom);
      this.levels = ticks(bottom, top, 5);
    }

    path(points, kind, color) {
      const made = document.createElementNS(this.svg.namespaceURI, "path");
      made.setAttribute("d", "M" + points.map(([x, y]) =>
        `${(SIDE * x).toFixed(1)} ${(SIDE * (1 - y)).toFixed(1)}`).join(" L"));
      made.setAttribute("class", kind);
      if (color) made.style.setProperty("--color", `var(--${color})`);
      this.svg.append(made);
      return made;
    }

    mark(x, text) {
      if (x < 0 || x > 1) return;
      const title = document.createElementNS(this.svg.namespaceURI, "title");
      title.textContent = text;
      this.path([[x, 0], [x, 1]], "mark").append(title);
    }

    line(curve, all) {
      const noisy = curve.style === "noisy";
      const put = (points, kind) => {
        for (const part of this.parts(points)) this.path(part, kind, curve.color);
      };
      put(all, noisy ? "line faint" : "line");
      if (noisy) put(smoothed(all, shown.smooth ?? SMOOTH), "line");
      if (curve.style === "dots" || all.length === 1) {
        const kind = all.length <= LARGE_DOTS ? "dot" : "dot small";
        for (const [x, y] of all) if (y !== null && this.has(x)) put([[x, y], [x, y]], kind);
      }
    }

    has(x) { return x >= this.low && x <= this.high; }

    // The stretches of a line inside of the range, each with its ends on the border.
    parts(points) {
      const found = [];
      let open = null;
      const close = () => { if (open) found.push(open); open = null; };
      points.forEach(([x, y], i) => {
        if (y === null) { close(); return; }
        const before = points[i - 1];
        if (before && before[1] !== null && this.has(x) !== this.has(before[0])) {
          const edge = (this.has(x) ? before[0] : x) < this.low ? this.low : this.high;
          const share = (edge - before[0]) / (x - before[0]);
          const cut = [this.across(edge), this.up(before[1] + share * (y - before[1]))];
          if (this.has(x)) open = [cut]; else { open?.push(cut); close(); }
        }
        if (this.has(x)) (open ??= []).push([this.across(x), this.up(y)]);
      });
      close();
      return found;
    }

    labels() {
      this.plot.querySelectorAll(".x, .y").forEach((old) => old.remove());
      const add = (text, kind, side, share) => {
        const made = element("span", text);
        made.className = kind;
        if (side) made.style[side] = `${(100 * share).toFixed(2)}%`;
        this.svg.before(made);
      };
      const levels = spellAll(this.levels);
      this.levels.forEach((y, k) => add(levels[k], "y", "top", 1 - this.up(y)));
      const places = ticks(this.low, this.high, 4).filter((x) => shown.axis === "seconds" || shown.axis === "bytes" || Number.isInteger(x));
      for (const x of places) add(spellAxis(x), "x", "left", this.across(x));
      const word = { step: "steps", seconds: "time", samples: "samples", bytes: "sent by all" }[shown.axis];
      if (places.every((x) => this.across(x) > 0.12)) add(word, "x left");
    }

    leave() {
      tip.hidden = true;
      this.hair.remove();
      this.spots.forEach((spot) => spot.remove());
    }

    // Where the pointer is, 0 to 1 from left to right.
    share(event) {
      const box = this.plot.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    }

    show(event) {
      const curves = this.visible, x = this.share(event), box = this.plot.getBoundingClientRect();
      this.leave();
      if (!curves.length) return;
      const found = curves.map((curve) => nearest(curve.x, x));
      const best = curves.reduce((b, c, i) =>
        Math.abs(c.x[found[i]] - x) < Math.abs(curves[b].x[found[b]] - x) ? i : b, 0);
      const at = curves[best].x[found[best]], step = curves[best].step[found[best]];
      if (at < 0 || at > 1) return;
      tip.replaceChildren();
      const over = shown.axis === "step" ? "" : ` · ${spellAxis(along(curves[best].run, step))}`;
      element("b", `step ${step.toLocaleString("en")}${over}`, tip);
      curves.forEach((curve, i) => {
        const k = found[i], spot = this.spots[this.curves.indexOf(curve)];
        if (Math.abs(curve.x[k] - at) >= 0.02) return;
        const row = element("div", "", tip);
        element("i", "", row, curve.color);
        element("em", curve.step[k] === step ? curve.name
          : `${curve.name} (${curve.step[k].toLocaleString("en")})`, row);
        element("strong", curve.text[k], row);
        if (curve.y[k] === null) return;
        spot.style.left = `${100 * curve.x[k]}%`;
        spot.style.top = `${100 * (1 - curve.y[k])}%`;
        this.plot.append(spot);
      });
      this.hair.style.left = `${100 * at}%`;
      this.plot.append(this.hair);
      place(box.left + at * box.width, event.clientY);
    }
  }

  const charts = [...document.querySelectorAll("[data-chart]")].map((plot) => new Chart(plot));

  // -- what changes it ---------------------------------------------------------------------------------------

  const reset = element("button", "Whole run");
  const redraw = () => {
    reset.hidden = shown.from === null;
    for (const chart of charts) chart.draw();
  };
  const zoom = (from, to) => { [shown.from, shown.to] = [from, to]; redraw(); };

  const controls = () => {
    const bar = element("div");
    bar.className = "controls";
    const axis = element("select", "", element("label", "Over ", bar));
    for (const [value, name] of [["step", "steps"], ["seconds", "time"], ["samples", "samples"], ["bytes", "bytes sent"]]) {
      element("option", name, axis).value = value;
    }
    axis.addEventListener("change", () => { shown.axis = axis.value; zoom(null, null); });
    const range = element("input", "", element("label", "Smoothing ", bar));
    Object.assign(range, { type: "range", min: 0, max: 50, step: 0.5, value: 100 * SMOOTH });
    range.addEventListener("input", () => { shown.smooth = range.value / 100; redraw(); });
    reset.type = "button";
    reset.hidden = true;
    reset.addEventListener("click", () => zoom(null, null));
    bar.append(reset);
    element("span", "drag over a chart to zoom, double-click for the whole run", bar);
    area.before(bar);
  };

  const dragging = (chart) => {
    let began = null, box = null;
    const end = () => { began = null; box?.remove(); box = null; };
    chart.plot.addEventListener("pointerdown", (event) => { began = chart.share(event); chart.show(event); });
    chart.plot.addEventListener("pointermove", (event) => {
      const now = chart.share(event), wide = began !== null && Math.abs(now - began) * chart.plot.clientWidth > 8;
      if (!wide) { chart.show(event); return; }
      chart.leave();
      if (!box) {
        box = element("div", "", chart.plot);
        box.className = "box";
        chart.plot.setPointerCapture(event.pointerId);
      }
      box.style.left = `${100 * Math.min(began, now)}%`;
      box.style.width = `${100 * Math.abs(now - began)}%`;
    });
    chart.plot.addEventListener("pointerup", (event) => {
      const [from, to] = [began, chart.share(event)].sort((a, b) => a - b), span = chart.high - chart.low;
      const chosen = box !== null;
      end();
      if (chosen) zoom(chart.low + from * span, chart.low + to * span);
    });
    chart.plot.addEventListener("pointercancel", () => { end(); chart.leave(); });
    chart.plot.addEventListener("pointerleave", () => { if (!box) { began = null; chart.leave(); } });
    chart.plot.addEventListener("dblclick", () => zoom(null, null));
  };

  const switches = () => {
    const all = [...area.querySelectorAll(".legend [data-color]")];
    const flip = (color) => {
      if (!shown.hidden.delete(color)) shown.hidden.add(color);
      for (const key of all) key.setAttribute("aria-pressed", !shown.hidden.has(key.dataset.color));
      redraw();
    };
    for (const key of all) {
      Object.assign(key, { tabIndex: 0, title: "show or hide" });
      key.setAttribute("role", "button");
      key.setAttribute("aria-pressed", true);
      key.addEventListener("click", () => flip(key.dataset.color));
      key.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); flip(key.dataset.color); }
      });
    }
  };

  if (charts.length) {
    controls();
    switches();
    charts.forEach(dragging);
    redraw();
  }

  for (const part of document.querySelectorAll("[data-tip]")) {
    part.addEventListener("pointermove", (event) => {
      tip.textContent = part.dataset.tip;
      place(event.clientX, event.clientY);
    });
    part.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
