// Draws the curves that oelm/report/board/curves.py prepares, with uPlot. It needs no server: a page that has
// the data can call oelmChart(figure, data). A figure gets a plot, a legend of buttons, the values at the cursor
// and a table.
"use strict";
(() => {
  const COLOURS = 8;
  const MOST_BANDS = 4;  // with more lines, intervals hide each other, so only those of chosen lines are drawn
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [3, 2, 1, 2], [1, 2], [12, 6]];

  // Width in pixels of the vertical axis: room for the longest label.
  const widthOfLabels = (_u, labels) => labels ? Math.max(50, 18 + 7 * Math.max(...labels.map((label) => String(label).length))) : 58;
  // Distances between two labels of the axis of steps: 1, 2, 5, 10, 20, ...
  const STEP_DISTANCES = Array.from({ length: 30 }, (_x, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

  // When the colours repeat, they get other dashes, so that 64 lines can be distinguished.
  function dash(line) { return DASHES[(line + 3 * Math.floor(line / COLOURS)) % DASHES.length]; }

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function withAlpha(hex, alpha) {
    return hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  }

  function shown(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return Number(value.toPrecision(5)).toString();
  }

  // The columns of uPlot's data, and for each column the line it belongs to.
  function columns(data) {
    const table = [data.steps];
    const roles = [{ kind: "x" }];
    data.lines.forEach((line, i) => {
      for (const kind of ["low", "high", "mean"]) {
        table.push(line[kind]);
        roles.push({ kind, line: i });
      }
      for (const seed of line.seeds) {
        table.push(seed.values);
        roles.push({ kind: "seed", line: i });
      }
    });
    return { table, roles };
  }

  // Losses fall steeply at first. The first tenth of the steps does not set the scale of these measurements.
  const STEEP = ["ppl", "loss", "validation_loss", "grad_norm"];

  // The range of the means and seeds between two steps. Intervals do not count: with two seeds they are so wide
  // that the curves would be flat lines.
  function valueRange(data, from, to) {
    const { steps, lines, measurement } = data;
    const last = steps[steps.length - 1];
    if (STEEP.includes(measurement) && from <= steps[0] && to >= last) from = 0.1 * last;
    let low = Infinity, high = -Infinity;
    for (const line of lines) {
      for (const list of [line.mean, ...line.seeds.map((seed) => seed.values)]) {
        list.forEach((value, i) => {
          if (value === null || steps[i] < from || steps[i] > to) return;
          low = Math.min(low, value);
          high = Math.max(high, value);
        });
      }
    }
    if (low > high) return [0, 1];
    const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  class Chart {
    constructor(figure, data) {
      this.figure = figure;
      this.chosen = new Set();   // lines whose seeds stay visible
      this.pointed = null;       // line under the pointer or with the focus
      this.plotBox = element("div", { className: "plot", tabIndex: 0, role: "img" });
      this.legend = element("ul", { className: "legend" });
      this.readout = element("p", { className: "readout", role: "status" });
      this.summary = element("summary");
      this.table = element("div", { className: "scroll" });
      this.details = element("details", {}, this.summary, this.table);
      figure.append(this.plotBox, this.legend, this.readout, this.details);
      this.plotBox.addEventListener("keydown", (event) => this.onKey(event));
      this.details.addEventListener("toggle", () => this.fillTable());
      new ResizeObserver(() => this.resize()).observe(this.plotBox);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
      this.update(data);
    }

    update(data) {
      const shape = JSON.stringify([data.measurement, data.lines.map((l) => [l.name, l.seeds.map((s) => s.run)])]);
      this.data = data;
      if (shape === this.shape && this.uplot) {
        this.uplot.setData(columns(data).table);
      } else {
        this.shape = shape;
        this.chosen.clear();
        this.pointed = null;
        this.build();
        this.fillLegend();
      }
      this.describe();
      this.fillTable();
    }

    build() {
      if (this.uplot) this.uplot.destroy();
      const { table, roles } = columns(this.data);
      const ink = colour("--soft"), grid = colour("--line");
      this.roles = roles;
      const series = roles.map(({ kind, line }) => {
        if (kind === "x") return { label: this.data.words.step };
        const hue = colour(`--arm-${line % COLOURS}`);
        if (kind === "mean") return { stroke: hue, width: 2, dash: dash(line), spanGaps: true, points: { show: table[0].length < 40, size: 5, fill: hue } };
        if (kind === "seed") return { stroke: withAlpha(hue, 0.55), width: 1, spanGaps: true, show: false, points: { show: false } };
        return { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      });
      const bands = [];
      roles.forEach(({ kind, line }, i) => {
        if (kind === "high") bands.push({ series: [i, i - 1], fill: withAlpha(colour(`--arm-${line % COLOURS}`), 0.16) });
      });
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
      this.uplot = new uPlot({
        width: Math.max(200, this.plotBox.clientWidth),
        height: this.height(),
        series,
        bands,
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false }, y: { range: (u) => valueRange(this.data, u.scales.x.min, u.scales.x.max) } },
        axes: [{ ...axis, size: 34, incrs: STEP_DISTANCES }, { ...axis, size: widthOfLabels, values: (_u, ticks) => ticks.map(shown) }],
        hooks: { setCursor: [() => this.showValues()] },
      }, table, this.plotBox);
      this.emphasise();
    }

    height() { return Math.round(Math.min(300, Math.max(200, this.plotBox.clientWidth * 0.55))); }

    resize() {
      const width = this.plotBox.clientWidth;
      if (this.uplot && width > 0 && width !== this.uplot.width) this.uplot.setSize({ width, height: this.height() });
    }

    fillLegend() {
      this.legend.replaceChildren(...this.data.lines.map((line, i) => {
        const value = element("span", { className: "value" });
        const button = element("button", { type: "button", className: `arm arm-${i % COLOURS}`, ariaPressed: "false" },
          swatch(i), element("span", { className: "name", textContent: line.name }), value);
        button.addEventListener("click", () => {
          if (!this.chosen.delete(i)) this.chosen.add(i);
          button.ariaPressed = String(this.chosen.has(i));
          this.emphasise();
        });
        for (const [on, line] of [["pointerenter", i], ["focus", i], ["pointerleave", null], ["blur", null]]) {
          button.addEventListener(on, () => { this.pointed = line; this.emphasise(); });
        }
        return element("li", {}, button);
      }));
    }

    // Show the seeds and intervals of the chosen lines and of the line that is pointed at; let the others fade.
    emphasise() {
      const strong = new Set(this.chosen);
      if (this.pointed !== null) strong.add(this.pointed);
      this.uplot.batch(() => this.roles.forEach(({ kind, line }, i) => {
        if (kind === "x") return;
        const series = this.uplot.series[i];
        const show = kind === "mean" || strong.has(line) || (kind !== "seed" && this.data.lines.length <= MOST_BANDS);
        if (series.show !== show) this.uplot.setSeries(i, { show });
        series.alpha = strong.size === 0 || strong.has(line) ? 1 : 0.2;
      }));
      this.uplot.redraw();
    }

    onKey(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves) || this.data.steps.length === 0) return;
      event.preventDefault();
      const last = this.data.steps.length - 1;
      const from = this.uplot.cursor.idx ?? last;
      const at = Math.min(last, Math.max(0, from + moves[event.key]));
      this.uplot.setCursor({ left: this.uplot.valToPos(this.data.steps[at], "x"), top: 10 });
    }

    // The values at the cursor, else the last ones.
    showValues() {
      const { words, steps, lines } = this.data;
      const at = this.uplot && this.uplot.cursor.idx;
      const values = this.legend.querySelectorAll(".value");
      lines.forEach((line, i) => {
        const place = at ?? lastIndex(line.mean);
        const seeds = line.seeds.length > 1 && place >= 0 ? ` (n = ${line.n[place]})` : "";
        if (values[i]) values[i].textContent = place < 0 ? "–" : shown(line.mean[place]) + seeds;
      });
      this.readout.textContent = steps.length === 0 ? words.empty : words.at.replace("{n}", steps[at ?? steps.length - 1]);
    }

    describe() {
      const { label, lines, words } = this.data;
      const last = lines.map((line) => {
        const place = lastIndex(line.mean);
        return `${line.name}: ${place < 0 ? "–" : shown(line.mean[place])}`;
      });
      this.plotBox.ariaLabel = `${label}. ${last.join(", ")}. ${words.hint}`;
      this.summary.textContent = words.table;
      this.showValues();
    }

    // At most about 25 rows, the last one always among them. Filled when it is opened.
    fillTable() {
      if (!this.details.open) return;
      const { steps, lines, words, label } = this.data;
      const every = Math.max(1, Math.ceil(steps.length / 25));
      const places = steps.map((_step, i) => i).filter((i) => (steps.length - 1 - i) % every === 0);
      const head = element("tr", {}, cell("th", words.step, "col"), ...lines.map((line) => cell("th", line.name, "col")));
      const rows = places.map((i) => element("tr", {}, cell("th", String(steps[i]), "row"), ...lines.map((line) => {
        const interval = line.low[i] === null ? "" : ` (${shown(line.low[i])} – ${shown(line.high[i])}; n = ${line.n[i]})`;
        return cell("td", line.mean[i] === null ? "–" : shown(line.mean[i]) + interval);
      })));
      this.table.replaceChildren(element("table", {}, element("caption", { textContent: `${label}: ${words.mean}, ${words.interval}` }),
        element("thead", {}, head), element("tbody", {}, ...rows)));
    }
  }

  function cell(tag, text, scope) {
    return element(tag, scope ? { textContent: text, scope } : { textContent: text });
  }

  function lastIndex(list) {
    for (let i = list.length - 1; i >= 0; i--) if (list[i] !== null) return i;
    return -1;
  }

  function swatch(i) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ x1: 0, x2: 28, y1: 6, y2: 6, "stroke-dasharray": dash(i).join(" ") })) line.setAttribute(name, value);
    svg.setAttribute("class", "swatch");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  window.oelmChart = (figure, data) => {
    if (figure.oelmChart) figure.oelmChart.update(data);
    else figure.oelmChart = new Chart(figure, data);
    return figure.oelmChart;
  };
})();
