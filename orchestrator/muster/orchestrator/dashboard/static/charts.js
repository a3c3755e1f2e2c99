// Draws every figure that carries data with uPlot, in place of the server's picture of the same.
"use strict";

const charts = (() => {
  const drawn = new Map();
  const sync = typeof uPlot === "undefined" ? null : uPlot.sync("steps");

  const tick = new Intl.NumberFormat(language, { maximumSignificantDigits: 3, useGrouping: false });

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function round(value, decimals) {
    return value.toLocaleString(language, { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }

  // Evaluations: a whisker for the interval, then the dot.
  function dots(series) {
    return (u, index) => {
      const { ctx } = u;
      ctx.save();
      ctx.beginPath();
      ctx.rect(u.bbox.left - 6, u.bbox.top - 6, u.bbox.width + 12, u.bbox.height + 12);
      ctx.clip();
      ctx.strokeStyle = style("--ink");
      ctx.fillStyle = style("--card");
      u.data[0].forEach((step, i) => {
        const value = u.data[index][i];
        if (value == null) return;
        const x = u.valToPos(step, "x", true), y = u.valToPos(value, "y", true);
        if (series.low && series.low[i] != null) {
          ctx.globalAlpha = 0.55;
          ctx.lineWidth = devicePixelRatio;
          ctx.beginPath();
          ctx.moveTo(x, u.valToPos(series.low[i], "y", true));
          ctx.lineTo(x, u.valToPos(series.high[i], "y", true));
          ctx.stroke();
          ctx.globalAlpha = 1;
        }
        ctx.lineWidth = 1.5 * devicePixelRatio;
        ctx.beginPath();
        ctx.arc(x, y, 3 * devicePixelRatio, 0, 2 * Math.PI);
        ctx.fill();
        ctx.stroke();
      });
      ctx.restore();
      return null;
    };
  }

  function limits(data) {
    const values = data.series.flatMap((s) => [...s.values, ...(s.low || []), ...(s.high || [])])
      .filter((v) => v != null);
    if (data.floor != null) values.push(data.floor);
    if (data.ceiling != null) values.push(data.ceiling);
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * 0.04;
    return [low === data.floor ? low : low - room, high === data.ceiling ? high : high + room];
  }

  function options(figure, data, width, height) {
    const axis = { stroke: style("--soft"), font: "11px system-ui, sans-serif",
      grid: { stroke: style("--rule"), width: 1 }, ticks: { show: false } };
    const colours = [style("--accent"), style("--s1")];
    const series = data.series.map((each, i) => each.dots
      ? { label: each.label, paths: dots(each), points: { show: false }, stroke: style("--ink") }
      : { label: each.label, stroke: colours[i], width: 1.75, spanGaps: !each.has_gaps,
          points: { show: data.steps.length < 2 } });
    const steps = data.steps.length;
    return {
      width, height, padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: sync.key, setSeries: false }, points: { size: 6 },
        drag: { x: steps > 2, y: false } },
      scales: {
        // One point alone would get an axis of uPlot's own making.
        x: { time: false, range: (_, low, high) => (steps > 1 ? [low, high] : [data.steps[0] - 1, data.steps[0] + 1]) },
        y: { range: () => limits(data) },
      },
      axes: [
        { ...axis, size: 24, gap: 5, grid: { show: false },
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] },
        { ...axis, size: 46, gap: 7, space: 34,
          values: (_, ticks) => ticks.map((v) => (Math.abs(v) >= 1e4 ? `${tick.format(v / 1e3)}k` : tick.format(v))) },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(u) => tell(figure, data, u)] },
    };
  }

  function tell(figure, data, u) {
    const box = figure.querySelector(".readout"), at = u.cursor.idx;
    const shown = at == null ? [] : data.series.map((s) => [s.label, s.values[at]])
      .filter(([, value]) => value != null);
    box.hidden = !shown.length || u.cursor.left < 0;
    if (box.hidden) return;
    box.textContent = `${data.steps[at]}  ` + shown
      .map(([label, value]) => (shown.length > 1 ? `${label} ` : "") + round(value, data.decimals)).join("  ");
    const left = u.cursor.left + u.bbox.left / devicePixelRatio;
    box.style.left = `${Math.max(0, Math.min(left + 10, u.width - box.offsetWidth))}px`;
  }

  function draw(figure) {
    const data = JSON.parse(figure.dataset.chart), canvas = figure.querySelector(".canvas");
    const width = canvas.clientWidth;
    const height = figure.classList.contains("hero") ? Math.min(300, Math.max(190, width * 0.36)) : 170;
    const old = drawn.get(figure.id);
    if (old) old.plot.destroy();
    const readout = document.createElement("div");
    readout.className = "readout";
    readout.hidden = true;
    const picture = canvas.querySelector("svg.plot");
    const plot = new uPlot(options(figure, data, width, height),
      [data.steps, ...data.series.map((s) => s.values)]);
    plot.root.setAttribute("role", "img");
    if (picture) plot.root.setAttribute("aria-label", picture.getAttribute("aria-label"));
    else if (old) plot.root.setAttribute("aria-label", old.label);
    canvas.replaceChildren(plot.root, readout);
    drawn.set(figure.id, { plot, source: figure.dataset.chart, label: plot.root.getAttribute("aria-label") });
  }

  function drawAll(again) {
    if (!sync) return;
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const old = drawn.get(figure.id);
      if (again || !old || !figure.contains(old.plot.root)) draw(figure);
    }
  }

  // The fresh page's figure: a new one, the same, or the same with more points.
  function update(fresh) {
    const here = document.getElementById(fresh.id);
    if (!here || here.dataset.chart === fresh.dataset.chart) return;
    here.replaceWith(fresh);
    drawn.delete(fresh.id);
    if (sync && fresh.dataset.chart) draw(fresh);
  }

  return { drawAll, update };
})();

charts.drawAll(false);
addEventListener("resize", () => {
  clearTimeout(charts.timer);
  charts.timer = setTimeout(() => charts.drawAll(true), 120);
});
