// Shows the values under the pointer: those of a chart nearest to it in step, and those of the bars of time.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const element = (name, text, parent, color) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (color) made.style.background = `var(--${color})`;
    if (parent) parent.append(made);
    return made;
  };

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

  for (const plot of document.querySelectorAll("[data-chart]")) {
    const curves = JSON.parse(plot.dataset.chart);
    const hair = element("div", "", null);
    hair.className = "hair";
    const spots = curves.map((curve) => {
      const spot = element("div", "", null, curve.color);
      spot.className = "spot";
      return spot;
    });
    const leave = () => { tip.hidden = true; hair.remove(); spots.forEach((spot) => spot.remove()); };
    const show = (event) => {
      const box = plot.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const found = curves.map((curve) => nearest(curve.x, x));
      const best = curves.reduce((b, c, i) =>
        Math.abs(c.x[found[i]] - x) < Math.abs(curves[b].x[found[b]] - x) ? i : b, 0);
      const at = curves[best].x[found[best]];
      tip.replaceChildren();
      element("b", `step ${curves[best].step[found[best]].toLocaleString("en")}`, tip);
      curves.forEach((curve, i) => {
        const k = found[i];
        const near = Math.abs(curve.x[k] - at) < 0.02;
        if (!near) { spots[i].remove(); return; }
        const row = element("div", "", tip);
        element("i", "", row, curve.color);
        element("em", curve.step[k] === curves[best].step[found[best]] ? curve.name
          : `${curve.name} (${curve.step[k].toLocaleString("en")})`, row);
        element("strong", curve.text[k], row);
        if (curve.y[k] === null) { spots[i].remove(); return; }
        spots[i].style.left = `${100 * curve.x[k]}%`;
        spots[i].style.top = `${100 * (1 - curve.y[k])}%`;
        plot.append(spots[i]);
      });
      hair.style.left = `${100 * at}%`;
      plot.append(hair);
      place(box.left + at * box.width, event.clientY);
    };
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("pointercancel", leave);
  }

  for (const part of document.querySelectorAll("[data-tip]")) {
    part.addEventListener("pointermove", (event) => { tip.textContent = part.dataset.tip; place(event.clientX, event.clientY); });
    part.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
