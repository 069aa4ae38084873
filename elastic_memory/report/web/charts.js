/* Charts of every page: uPlot with a legend of our own, values on hover or by arrow keys, PNG and CSV, light and dark.

   A chart is data: {title, note, wide, height, x: {label, log, categories}, y: {label, log, percent},
   series: [{name, x, y, dashed, dots, thick, points, color}], marks: [{from, to, label}], ticks: [x]}. All text is set as text, never as markup. */
"use strict";

const Charts = (() => {
  const drawn = new Set();

  function element(tag, options = {}, ...children) {
    const { dataset, ...rest } = options, node = Object.assign(document.createElement(tag), rest);
    Object.assign(node.dataset, dataset || {});
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const color = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--c${index % 8}`).trim();
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Four digits: plain where it reads well, with an exponent where it is small or large. */
  function format(value, percent) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    if (percent) return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)}%`;
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    if (size >= 1e4) return Number.isInteger(value) ? value.toLocaleString("en") : short(value);
    return String(Number(value.toPrecision(4)));
  }

  function short(value) {
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
    return size !== 0 && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
  }

  /** One common x for all series; what a series does not have there is undefined. */
  function aligned(spec) {
    const usable = (spec.y.log || spec.x.log) ? spec.series.map((one) => {
      const keep = one.x.map((x, i) => (!spec.x.log || x > 0) && (!spec.y.log || one.y[i] === null || one.y[i] > 0));
      return { ...one, x: one.x.filter((_, i) => keep[i]), y: one.y.filter((_, i) => keep[i]) };
    }) : spec.series;
    const filled = usable.map((one) => (one.x.length ? [one.x, one.y] : [[spec.x.log ? 1 : 0], [null]]));
    return filled.length > 1 ? uPlot.join(filled) : filled[0];
  }

  function axes(spec) {
    const common = { stroke: shade("soft"), grid: { stroke: shade("grid"), width: 1 }, ticks: { stroke: shade("grid"), width: 1 }, labelSize: 20, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif" };
    const across = { ...common, size: 34, label: spec.x.label, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) };
    const crowded = spec.x.categories && spec.x.categories.join("").length > 40;
    if (spec.x.categories) Object.assign(across, {
      ...(crowded ? { rotate: 40, size: 62 } : {}),
      splits: () => spec.x.categories.map((_, i) => i),
      values: (u, ticks) => ticks.map((tick) => spec.x.categories[tick] ?? ""),
    });
    const up = { ...common, size: 58, label: spec.y.label, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : spec.y.percent ? `${Number((100 * tick).toPrecision(3))}%` : short(tick))) };
    return [across, up];
  }

  const scale = (axis, range) => ({ time: false, ...(axis.log ? { distr: 3, log: axis.log } : {}), ...(range ? { range } : {}) });

  function options(chart, width) {
    const { spec } = chart, { categories } = spec.x, marks = () => chart.spec.marks || [];
    const range = spec.x.log ? (u, least, most) => [least, most] : categories ? () => [-0.4, categories.length - 0.6]
      : marks().length ? (u, least, most) => [Math.min(least, ...marks().map((mark) => mark.from)), Math.max(most, ...marks().map((mark) => mark.to)) + (marks()[0].from < 0 ? 0.5 : 0)] : undefined;
    return {
      width, height: spec.height || 260, legend: { show: false }, axes: axes(spec),
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: scale(spec.x, range), y: scale(spec.y) },
      series: [{}, ...spec.series.map((one, i) => {
        const stroke = color(one.color ?? i) + (one.thick ? "70" : ""), few = one.x.length <= 40, dashed = one.dashed || (one.color ?? i) >= 8;
        return { label: one.name, stroke, width: one.dots ? 0 : one.thick ? 5 : 1.75, dash: dashed ? [6, 4] : undefined,
          ...(one.dots ? { paths: () => null } : {}),
          points: { show: Boolean(one.dots) || ((few || one.points) && !one.thick), size: one.dots ? 7 : 5, width: 1.5, stroke, fill: one.dots ? stroke : shade("card") } };
      })],
      hooks: { drawAxes: [(u) => { marks().forEach((mark) => band(u, mark)); ticks(u, chart.spec.ticks || []); }], setCursor: [(u) => chart.u && chart.values(u.cursor.idx)] },
    };
  }

  /** A shaded stretch of x, such as block 0, with its name. */
  function band(u, mark) {
    const [left, right] = [mark.from, mark.to].map((at) => u.valToPos(at, "x", true));
    const { ctx, bbox } = u, from = Math.max(left, bbox.left), to = Math.min(right, bbox.left + bbox.width);
    if (to <= from) return;
    ctx.save();
    ctx.fillStyle = shade("band");
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    ctx.fillStyle = shade("soft");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    const room = bbox.left + bbox.width - ctx.measureText(mark.label).width - 4 * devicePixelRatio;
    ctx.fillText(mark.label, Math.min(from + 4 * devicePixelRatio, room), bbox.top + 3 * devicePixelRatio);
    ctx.restore();
  }

  /** Short lines at the foot of the plot, such as sample points or the edges of cells. */
  function ticks(u, places) {
    const { ctx, bbox } = u, foot = bbox.top + bbox.height;
    ctx.save();
    ctx.strokeStyle = shade("soft");
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    for (const place of places) {
      const x = Math.round(u.valToPos(place, "x", true)) + 0.5;
      ctx.moveTo(x, foot);
      ctx.lineTo(x, foot - 9 * devicePixelRatio);
    }
    ctx.stroke();
    ctx.restore();
  }

  class Chart {
    constructor(host, spec) {
      this.plot = element("div", { className: "plot", tabIndex: 0 });
      this.legend = element("div", { className: "legend" });
      this.note = element("p", { className: "note" });
      this.title = element("h3");
      const tool = (label, title, act) => element("button", { type: "button", textContent: label, title, onclick: act });
      const tools = element("div", { className: "tools" },
        tool("PNG", "Save this picture", () => this.png()), tool("CSV", "Save these numbers", () => this.csv()));
      this.figure = element("figure", { className: "chart" }, element("div", { className: "head" }, this.title, tools), this.plot, this.legend, this.note);
      host.append(this.figure);
      this.hidden = new Set();
      this.plot.onkeydown = (event) => this.step(event);
      this.update(spec);
      this.watch = new ResizeObserver(() => this.u && this.plot.clientWidth && this.u.setSize({ width: this.plot.clientWidth, height: this.spec.height || 260 }));
      this.watch.observe(this.plot);
      drawn.add(this);
    }

    /** New numbers: of the same series they are only put in, other series make a new plot. */
    update(spec) {
      const key = (one) => JSON.stringify([one.x, one.y.label, one.y.log, one.height, one.series.map((s) => [s.name, s.dots, s.dashed, s.color])]);
      const same = this.spec && this.u && key(this.spec) === key(spec);
      this.spec = spec;
      this.title.textContent = spec.title;
      this.note.textContent = spec.note || "";
      this.note.hidden = !spec.note;
      this.figure.classList.toggle("wide", Boolean(spec.wide));
      this.plot.setAttribute("role", "img");
      this.plot.setAttribute("aria-label", `${spec.title}: ${spec.series.map((one) => one.name).join(", ")}. Arrow keys read values.`);
      if (same) this.u.setData(aligned(spec));
      else this.rebuild();
      this.values(this.u.cursor.idx);
    }

    rebuild() {
      this.u?.destroy();
      this.u = new uPlot(options(this, Math.max(this.plot.clientWidth, 200)), aligned(this.spec), this.plot);
      this.where = element("span", { className: "where" });
      this.buttons = this.spec.series.map((one, i) => {
        const swatch = element("i"), value = element("b");
        swatch.style.color = swatch.style.backgroundColor = color(one.color ?? i);
        if (one.dashed || (one.color ?? i) >= 8) { swatch.className = "dashed"; swatch.style.backgroundColor = "transparent"; }
        const button = element("button", { type: "button", title: "Show or hide", onclick: () => this.toggle(i) }, swatch, one.name, value);
        button.setAttribute("aria-pressed", !this.hidden.has(one.name));
        if (this.hidden.has(one.name)) this.u.setSeries(i + 1, { show: false });
        button.value_ = value;
        return button;
      });
      this.legend.classList.toggle("many", this.buttons.length > 8);
      this.legend.replaceChildren(...this.buttons, this.where);
    }

    toggle(index) {
      const name = this.spec.series[index].name, shown = this.hidden.has(name);
      shown ? this.hidden.delete(name) : this.hidden.add(name);
      this.u.setSeries(index + 1, { show: shown });
      this.buttons[index].setAttribute("aria-pressed", shown);
    }

    /** The values under the cursor; of a series that has none there, the nearest. */
    values(at) {
      const none = at === null || at === undefined, xs = this.u.data[0];
      const { x, y } = this.spec;
      this.where.textContent = none ? "" : `at ${x.label} ${x.categories ? x.categories[Math.round(xs[at])] : format(xs[at])}`;
      this.buttons.forEach((button, i) => {
        const ys = this.u.data[i + 1];
        let near = none ? undefined : ys[at];
        for (let far = 1; !none && near === undefined && (at - far >= 0 || at + far < ys.length); far++) near = ys[at - far] ?? ys[at + far];
        button.value_.textContent = none ? "" : format(near, y.percent);
      });
      this.onhover?.(none ? null : xs[at]);
    }

    step(event) {
      const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const last = this.u.data[0].length - 1;
      const at = Math.min(last, Math.max(0, (this.u.cursor.idx ?? (move > 0 ? -1 : last + 1)) + move));
      this.u.setCursor({ left: this.u.valToPos(this.u.data[0][at], "x"), top: 10 });
    }

    csv() {
      const quote = (cell) => {
        const text = cell === null || cell === undefined ? "" : String(cell);
        const safe = typeof cell === "string" && /^[=+\-@\t]/.test(text) ? `'${text}` : text;  // no formula for a spreadsheet
        return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
      };
      const [xs, ...columns] = this.u.data, names = this.spec.x.categories;
      const rows = xs.map((x, i) => [names ? names[Math.round(x)] : x, ...columns.map((ys) => ys[i])]);
      const lines = [[this.spec.x.label, ...this.spec.series.map((one) => one.name)], ...rows].map((row) => row.map(quote).join(","));
      save(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), `${this.file()}.csv`);
    }

    /** The plot with its title and legend on the page's background. */
    png() {
      const source = this.u.ctx.canvas, ratio = devicePixelRatio, line = 20 * ratio, pad = 12 * ratio;
      const canvas = element("canvas", { width: source.width + 2 * pad }), ctx = canvas.getContext("2d");
      const font = `${13 * ratio}px system-ui, sans-serif`;
      ctx.font = font;
      const rows = [[]];
      let used = 0;
      this.spec.series.forEach((one, i) => {
        const width = ctx.measureText(one.name).width + 34 * ratio;
        if (used + width > source.width && used) { rows.push([]); used = 0; }
        rows.at(-1).push([one.name, color(one.color ?? i), used]);
        used += width;
      });
      canvas.height = source.height + line * (rows.length + 1) + 3 * pad;
      ctx.fillStyle = shade("card");
      ctx.fillRect(0, 0, canvas.width, canvas.height);
      ctx.font = `600 ${font}`;
      ctx.fillStyle = shade("ink");
      ctx.fillText(this.spec.title, pad, pad + 12 * ratio);
      ctx.drawImage(source, pad, pad + line);
      ctx.font = font;
      rows.forEach((row, r) => row.forEach(([name, stroke, left]) => {
        const top = 2 * pad + line * (r + 1) + source.height;
        ctx.fillStyle = stroke;
        ctx.fillRect(pad + left, top, 14 * ratio, 3 * ratio);
        ctx.fillStyle = shade("ink");
        ctx.fillText(name, pad + left + 18 * ratio, top + 5 * ratio);
      }));
      canvas.toBlob((blob) => save(blob, `${this.file()}.png`));
    }

    file() { return this.spec.title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "chart"; }

    remove() { this.watch.disconnect(); this.u.destroy(); this.figure.remove(); drawn.delete(this); }
  }

  function save(blob, name) {
    const link = element("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /** Light or dark: what was asked for, or what the system prefers. */
  function theme(wanted) {
    const name = wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = name;
    const button = document.getElementById("theme");
    if (button) button.textContent = name === "dark" ? "Light" : "Dark";
    drawn.forEach((chart) => chart.rebuild());
    return name;
  }

  const other = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const data = () => JSON.parse(document.getElementById("data").textContent);
  return { Chart, element, format, short, theme, other, data, save };
})();
