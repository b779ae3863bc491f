// The page of one run or of several: reads the JSON in #data, draws with uPlot, and writes untrusted text as text only.
"use strict";
(() => {
  const KEY = [
    "reward/mean", "eval/accuracy", "response_length/mean", "actor/loss", "actor/entropy", "mismatch/mean_abs", "eval/nll",
    "actor/approx_kl", "actor/grad_norm", "actor/lr", "throughput/train_tokens_per_second", "memory/rss_gib",
  ];
  const GROUPS = [ // title and prefixes; other prefixes make a group of their name
    ["Reward", ["reward", "greedy"]], ["Held-out evaluation", ["eval"]],
    ["Loss and policy", ["actor", "critic", "ref", "reward_model", "correction", "max"]],
    ["Sampler against trainer", ["mismatch", "policy_version"]],
    ["Responses and sampling", ["response_length", "rollouts", "tokens", "sampling", "stage", "stream", "async"]],
    ["Episodes", ["environment"]], ["Time", ["time"]], ["Throughput", ["throughput", "sync"]], ["Memory", ["memory"]], ["Data and plugins", ["data", "plugins"]],
  ];
  const OPEN = 4; // groups that are open at first, the overview included; a filter opens all
  const PAGE = 10; // completions shown at once
  const live = document.body.dataset.live === "1";
  const root = document.getElementById("page");
  const ui = { filter: "", smooth: 0.6, zoom: null, run: 0, set: 0, step: null, sort: "low", only: "all", search: "", page: 0, folds: {} };
  let data = JSON.parse(document.getElementById("data").textContent);

  // ---- elements, colors and numbers

  function h(name, props, ...children) {
    const [tag, ...classes] = name.split(".");
    const element = document.createElement(tag);
    element.className = classes.join(" ");
    for (const [key, value] of Object.entries(props || {})) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key in element) element[key] = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }
  const valuesOf = (run, name) => (Object.hasOwn(run.metrics, name) ? run.metrics[name] : null); // a name may be "constructor"
  const dot = (i) => { const d = h("i.dot"); d.style.background = `var(--c${i % 8})`; return d; };

  const probe = document.body.appendChild(h("i", { hidden: true }));
  let colors = {};
  function color(name, alpha) { // a canvas needs the color that a variable has in this theme
    if (!colors[name]) { probe.style.color = `var(${name})`; colors[name] = getComputedStyle(probe).color; }
    return alpha ? colors[name].replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`) : colors[name];
  }
  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9 || (size && size < 1e-4)) return value.toExponential(2).replace("e+", "e");
    if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
    return String(+value.toPrecision(4));
  }
  function tick(value, space) { // of an axis, as short as ticks with this space between them can be
    const size = Math.abs(value), digits = Math.max(1, Math.min(7, 1 + Math.ceil(Math.log10(size / (space || size)) || 0)));
    for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return `${+(value / unit).toPrecision(digits + 1)}${sign}`;
    return size && size < 1e-4 ? (+value.toPrecision(digits)).toExponential().replace("e+", "e") : String(+value.toPrecision(digits + 1));
  }
  function duration(seconds) {
    const [d, hours, m, s] = [seconds / 86400, (seconds % 86400) / 3600, (seconds % 3600) / 60, seconds % 60].map(Math.floor);
    return d ? `${d}d ${hours}h` : hours ? `${hours}h ${m}m` : m ? `${m}m ${s}s` : `${s}s`;
  }

  // ---- plots

  const plots = new Set(); // every uPlot on the page
  function plot(place, options, values) {
    const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { stroke: () => color("--line"), size: 4, width: 1 }, font: "11px system-ui, sans-serif" };
    const size = (u, labels) => 14 + 6.4 * Math.max(1, ...(labels || []).filter(Boolean).map((label) => label.length));
    const shown = new uPlot({
      width: Math.max(place.clientWidth, 120), height: options.height, legend: { show: false }, padding: [8, 18, 0, 0],
      ...options,
      axes: [{ ...axis, size: 26, gap: 3, space: 48, ...(options.x || {}) }, { ...axis, size, gap: 4, space: 28, values: (u, ticks, axis, width, space) => ticks.map((t) => (t === null ? "" : tick(t, space))) }],
    }, values, place);
    const watcher = new ResizeObserver(() => { if (place.clientWidth) shown.setSize({ width: place.clientWidth, height: shown.height }); });
    watcher.observe(place);
    plots.add(shown);
    return { u: shown, destroy() { watcher.disconnect(); plots.delete(shown); shown.destroy(); } };
  }
  function near(values, index) { // the nearest value, for metrics that not every step has
    for (let d = 0; d < values.length; d++) for (const i of [index - d, index + d]) if (values[i] !== null && values[i] !== undefined) return i;
    return null;
  }
  function smoothed(values) { // exponential moving mean, without the bias of its start
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = ui.smooth * sum + (1 - ui.smooth) * value;
      weight = ui.smooth * weight + 1 - ui.smooth;
      return sum / weight;
    });
  }
  function zoomTo(range) {
    ui.zoom = range;
    for (const panel of panels.values()) panel.zoom();
    phases.zoom();
    document.getElementById("reset").disabled = !range;
  }
  const cursor = { y: false, // moves in all panels at once; a dragged range becomes the zoom of all
    sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
    drag: { x: true, y: false, setScale: false }, points: { size: 7 }, bind: { dblclick: () => () => zoomTo(null) },
  };
  const dragged = (u) => {
    if (u.select.width < 3) return;
    const ends = [u.select.left, u.select.left + u.select.width].map((at) => u.posToVal(at, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomTo(ends);
  };
  function around(u, low, high) { // the range of an axis; of a constant, one that is not empty
    if (low === null) return [0, 1];
    return low < high ? uPlot.rangeNum(low, high, 0.1, true) : [Math.min(0, 2 * low), Math.max(0, 2 * low) || 1];
  }
  function show(u, values) { // draw new values in the zoomed range, or in their whole one
    u.batch(() => {
      u.setData(values, !ui.zoom);
      if (ui.zoom) u.setScale("x", { min: ui.zoom[0], max: ui.zoom[1] });
    });
  }

  // A metric: a line for each run, faint below its moving mean; with bounds of an interval where it has them.
  class Panel {
    constructor(name) {
      this.name = name;
      this.log = name === "actor/kl" || name.startsWith("mismatch/");
      this.values = h("div.values");
      this.place = h("div");
      this.logButton = h("button", { textContent: "log", title: "Logarithmic axis", onclick: () => { this.log = !this.log; this.draw(); } });
      const wide = h("button", { textContent: "⤢", title: "Full width", "aria-pressed": "false", onclick: () => {
        wide.setAttribute("aria-pressed", String(this.element.classList.toggle("wide")));
        this.draw();
      } });
      this.element = h("section.panel.card", {}, h("header", {}, h("h3", { textContent: name, title: name }), this.logButton, wide), this.values, this.place);
      this.element.dataset.metric = name;
    }
    tables() { // steps and [values, mean, low, high] of each run that has the metric
      this.runs = data.runs.map((run, i) => ({ run, i })).filter(({ run }) => valuesOf(run, this.name));
      return this.runs.map(({ run }) => {
        const y = run.metrics[this.name];
        const count = y.filter((value) => value !== null).length;
        const [low, high] = ["_low", "_high"].map((end) => run.metrics[this.name + end] || null);
        const mean = ui.smooth > 0 && count > 20 && !/^eval\/|\/lr$/.test(this.name) ? smoothed(y) : null;
        return { x: run.steps, columns: [y, mean, low && high ? low : null, low && high ? high : null], count };
      });
    }
    draw() {
      const tables = this.tables();
      const series = [{}], bands = [], values = [];
      this.columns = []; // of each run: the number of its values among the series
      tables.forEach((table, n) => {
        const name = `--c${this.runs[n].i % 8}`, [y, mean, low] = table.columns, stroke = () => color(name);
        this.columns.push(series.length);
        const few = this.name.startsWith("eval/") || table.count < 3;
        series.push({ stroke: mean ? () => color(name, 0.28) : stroke, width: mean ? 1 : 2, spanGaps: true, points: { show: few, size: 6, fill: stroke } });
        if (mean) series.push({ stroke, width: 2, spanGaps: true, points: { show: false } });
        if (low) {
          const at = series.length;
          for (let k = 0; k < 2; k++) series.push({ stroke: () => color(name, 0.25), width: 1, spanGaps: true, points: { show: false } });
          bands.push({ series: [at + 1, at], fill: () => color(name, 0.12) });
        }
        values.push([table.x, ...table.columns.filter(Boolean)]);
      });
      const joined = values.length ? uPlot.join(values) : [[]];
      const positive = joined.slice(1).flat().every((value) => value === null || value === undefined || value > 0);
      this.logButton.hidden = !positive;
      this.logButton.setAttribute("aria-pressed", String(this.log));
      const shape = JSON.stringify([this.columns, series.length, this.log && positive, this.element.className, tables.map((each, n) => [this.runs[n].i, each.count < 3])]);
      if (this.plot && shape === this.shape) show(this.plot.u, joined);
      else {
        this.plot?.destroy();
        this.shape = shape;
        this.plot = plot(this.place, {
          height: this.element.classList.contains("wide") ? 380 : 172, series, bands, cursor,
          scales: { x: { time: false }, y: this.log && positive ? { distr: 3 } : { range: around } },
          hooks: { setSelect: [dragged], setCursor: [() => this.read()] },
        }, joined);
        this.zoom();
      }
      this.read();
    }
    zoom() { if (this.plot) show(this.plot.u, this.plot.u.data); }
    read() { // the values below the cursor, else the last ones
      const u = this.plot?.u;
      if (!u) return;
      const at = u.cursor.idx ?? u.data[0].length - 1, over = u.cursor.idx !== null && u.cursor.idx !== undefined;
      let step = u.data[0][at];
      const shown = this.columns.map((column, n) => {
        const values = u.data[column], ended = data.runs.length > 1 && over && !values.slice(at).some((v) => v !== null && v !== undefined);
        const index = ended ? null : near(values, at);
        if (this.columns.length === 1 && index !== null) step = u.data[0][index];
        return h("span", {}, data.runs.length > 1 && [dot(this.runs[n].i), h("em", { textContent: this.runs[n].run.name })], h("b", { textContent: format(values[index]) }));
      });
      this.values.replaceChildren(...shown, h("span", { textContent: over || data.runs.length === 1 ? `${over ? "" : "last, "}step ${step ?? "–"}` : "" }));
    }
  }

  // The seconds of each phase of one run, stacked.
  const phases = {
    values: h("div.values"), place: h("div"),
    draw() {
      this.plot?.destroy();
      this.plot = null;
      const run = data.runs[ui.run], named = run.phases.map((name) => [name, run.metrics[`time/${name}`].map((v) => v || 0)]);
      this.element.hidden = !named.length;
      if (!named.length) return;
      if (run.metrics["time/step"]) {
        const rest = run.metrics["time/step"].map((all, i) => Math.max(0, (all || 0) - named.reduce((sum, [, y]) => sum + y[i], 0)));
        if (rest.some((v) => v > 0)) named.push(["other", rest]);
      }
      let below = run.steps.map(() => 0);
      const stacked = named.map(([, y]) => (below = below.map((sum, i) => sum + y[i]))).reverse(); // the highest first, the others over it
      const order = named.map((_, i) => named.length - 1 - i);
      const read = (u) => {
        const over = u.cursor.idx !== null && u.cursor.idx !== undefined, mean = (y) => y.reduce((a, b) => a + b, 0) / (y.length || 1);
        this.values.replaceChildren(
          h("span", { textContent: over ? `step ${u.data[0][u.cursor.idx]}` : "mean" }),
          ...named.map(([name, y], i) => h("span", {}, dot(i), name, h("b", { textContent: `${format(over ? y[u.cursor.idx] : mean(y))} s` }))),
        );
      };
      this.plot = plot(this.place, {
        height: 230, cursor, scales: { x: { time: false }, y: { range: (u, low, high) => [0, high * 1.05 || 1] } },
        // each phase is filled down to the next lower one, the lowest down to 0
        series: [{}, ...order.map((i) => ({ stroke: () => color(`--c${i % 8}`), fill: i ? undefined : () => color("--c0", 0.55), width: 1, points: { show: false } }))],
        bands: order.slice(0, -1).map((i, n) => ({ series: [n + 1, n + 2], fill: () => color(`--c${i % 8}`, 0.55) })),
        hooks: { setSelect: [dragged], setCursor: [read] },
      }, [run.steps, ...stacked]);
      this.zoom();
      read(this.plot.u);
    },
    zoom() { if (this.plot) show(this.plot.u, this.plot.u.data); },
  };

  // ---- head: states and numbers

  const head = h("div");
  function drawHead() {
    const several = data.runs.length > 1;
    document.getElementById("written").textContent = `Engine report, ${data.written}`;
    document.title = `${data.runs.map((run) => run.name).join(", ")} – Engine`;
    const cards = data.runs.map((run, i) => {
      const facts = {
        Model: run.about.model, Algorithm: run.about.algorithm, Data: run.about.data, Started: run.started, Duration: duration(run.seconds),
        Steps: `${run.step.toLocaleString("en-US")}${run.planned ? ` of ${run.planned.toLocaleString("en-US")}` : ""}`, Attempts: run.attempts > 1 ? run.attempts : "",
      };
      const bar = h("i");
      bar.style.width = `${Math.min(100, (100 * run.step) / (run.planned || 1))}%`;
      return h("section.run.card", {},
        h("div.title", {}, several && dot(i), h(several ? "h3" : "h1", { textContent: run.name }), h(`span.badge.${run.state}`, { textContent: run.state })),
        h("dl", {}, Object.entries(facts).filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value })))),
        run.state === "running" && run.planned && h("div.progress", {}, bar),
        run.reason && h(`p.note.${run.state}`, { textContent: run.reason }),
        !several && health(run),
        run.steps_in_a_point > 1 && h("p.note", { textContent: `Each point of a curve is the mean of ${run.steps_in_a_point} steps.` }));
    });
    head.replaceChildren(...cards);
    if (!several) {
      head.append(h("div.tiles", {}, data.runs[0].headline.map(([label, value, remark]) =>
        h("div.card", {}, h("span", { textContent: label }), h("b", { textContent: value }), h("small", { textContent: remark })))));
      return;
    }
    const labels = [...new Set(data.runs.flatMap((run) => run.headline.map(([label]) => label)))];
    const cell = (run, label) => { const found = run.headline.find(([name]) => name === label); return found ? `${found[1]}  (${found[2]})` : "–"; };
    head.append(h("div.card.numbers.scroll", {}, h("table", {},
      h("tr", {}, h("th"), data.runs.map((run, i) => h("th", {}, dot(i), ` ${run.name}`))),
      labels.map((label) => h("tr", {}, h("th", { textContent: label }), data.runs.map((run) => h("td", { textContent: cell(run, label) })))))));
  }

  // ---- metrics: the most important ones, then groups by prefix

  const panels = new Map();
  const metrics = h("section", { id: "metrics" });
  function drawMetrics() {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))];
    const bound = new Set(names.filter((name) => /_(low|high)$/.test(name) && names.includes(name.replace(/_(low|high)$/, "")))); // drawn in its metric's panel
    const top = KEY.filter((name) => names.includes(name)).slice(0, 6);
    const group = (name) => GROUPS.find(([, prefixes]) => prefixes.includes(name.split("/")[0]))?.[0] || name.split("/")[0];
    const titles = ["Overview", ...GROUPS.map(([title]) => title)];
    for (const [name, panel] of panels) if (!names.includes(name)) { panel.plot?.destroy(); panel.element.remove(); panels.delete(name); } // of steps that a resume repeats
    for (const name of names.filter((each) => !bound.has(each))) {
      if (!panels.has(name)) {
        const title = top.includes(name) ? "Overview" : group(name);
        let place = [...metrics.children].find((each) => each.dataset.title === title);
        if (!place) {
          place = h("details.group", { open: titles.slice(0, OPEN).includes(title) }, h("summary", {}, title, h("small")), h(title === titles[0] ? "div.panels.top" : "div.panels"));
          place.dataset.title = title;
          const rank = (text) => { const at = titles.indexOf(text); return at < 0 ? titles.length : at; };
          metrics.insertBefore(place, [...metrics.children].find((each) => rank(each.dataset.title) > rank(title)) || null);
        }
        const panel = new Panel(name);
        panels.set(name, panel);
        const rank = (each) => { // the most important ones, then by name, constants last
          const at = KEY.indexOf(each), constant = data.runs.every((run) => new Set((valuesOf(run, each) || []).filter((v) => v !== null)).size < 2);
          return at < 0 ? `9${+constant}${each}` : String(at).padStart(2, "0");
        };
        const grid = place.lastElementChild;
        grid.insertBefore(panel.element, [...grid.children].find((each) => rank(each.dataset.metric) > rank(name)) || null);
      }
      panels.get(name).draw();
    }
    filterMetrics();
  }
  function filterMetrics() {
    const words = ui.filter.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const panel of panels.values()) {
      const fits = words.every((word) => panel.name.toLowerCase().includes(word));
      panel.element.hidden = !fits;
      shown += fits;
    }
    for (const group of metrics.children) {
      const count = [...group.lastElementChild.children].filter((element) => !element.hidden).length;
      group.hidden = !count;
      if (words.length) group.open = true;
      group.querySelector("small").textContent = count;
    }
    document.getElementById("count").textContent = panels.size ? `${shown} of ${panels.size} metrics` : "no step is finished";
  }

  // ---- rollouts of a step: histograms and completions

  const rollouts = h("section", { id: "rollouts" });
  const current = () => { // the chosen set and step; the newest step until one is chosen
    const sets = data.runs[ui.run].sets || [], set = sets[Math.min(ui.set, sets.length - 1)];
    const found = set?.steps.findIndex((each) => each.step === ui.step) ?? -1;
    return { sets, set, at: found < 0 ? (set?.steps.length ?? 0) - 1 : found };
  };
  let histograms = [];
  function drawRollouts() {
    const { sets, set, at } = current(), focused = document.activeElement?.id;
    histograms.forEach((each) => each.destroy());
    histograms = [];
    if (!set) {
      rollouts.replaceChildren(h("h2", { textContent: "Rollouts of a step" }), h("div.card.empty", { textContent: data.runs[ui.run].sets ? data.runs[ui.run].unreadable || "This run has stored no rollouts (tracking.rollouts_every_steps)." : "Reading the stored rollouts." }));
      return;
    }
    const step = set.steps[at];
    const label = h("b", { textContent: step.step });
    const slider = h("input", { type: "range", id: "step", min: 0, max: set.steps.length - 1, value: at, "aria-label": "Step",
      oninput: () => { label.textContent = set.steps[slider.value].step; },
      onchange: () => { ui.step = set.steps[slider.value].step; ui.page = 0; drawRollouts(); } });
    const names = { reward: "Reward", length: "Response length, tokens", advantage: "Advantage: reward minus its group's mean" };
    const places = Object.keys(step.histograms).map((kind) => [kind, h("div"), h("div.values")]);
    rollouts.replaceChildren(
      h("h2", { textContent: "Rollouts of a step" }),
      h("div.bar", {},
        sets.length > 1 && choice("set", sets.map((each, i) => [i, each.name]), ui.set, (value) => { ui.set = +value; ui.step = null; ui.page = 0; drawRollouts(); }),
        h("label", {}, "Step", slider, label), h("span.soft", { textContent: `${step.count} rollouts, ${step.rows.length} on this page` })),
      h("div.panels.histograms", {}, places.map(([kind, place, values]) => h("section.panel.card", {}, h("header", {}, h("h3", { textContent: names[kind] })), values, place))),
      completions(step));
    for (const [kind, place, values] of places) {
      const counts = step.histograms[kind], [low, high] = set.ranges[kind], width = (high - low) / counts.length;
      const read = (u) => {
        const i = u.cursor.idx;
        values.textContent = i === null || i === undefined ? `${format(low)} to ${format(high)}` : `${format(low + i * width)} to ${format(low + (i + 1) * width)}: ${counts[i]}`;
      };
      histograms.push(plot(place, {
        height: 130, cursor: { drag: { x: false, y: false }, points: { show: false } }, hooks: { setCursor: [read] },
        scales: { x: { time: false, range: [low, high] }, y: { range: (u, a, b) => [0, b * 1.05 || 1] } },
        x: { values: (u, ticks, axis, size, space) => ticks.map((t) => tick(t, space)) },
        series: [{}, { stroke: () => color("--c0"), fill: () => color("--c0", 0.5), width: 1, paths: uPlot.paths.bars({ size: [0.92, 80] }), points: { show: false } }],
      }, [counts.map((_, i) => low + (i + 0.5) * width), counts]));
      read({ cursor: {} });
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true }); // drawn again while it is used
  }
  function choice(id, options, value, change) {
    const element = h("select", { id, "aria-label": id, onchange: () => change(element.value) }, options.map(([key, text]) => h("option", { value: key, textContent: text })));
    element.value = value;
    return element;
  }
  const SORTS = { low: ["Lowest reward first", (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity)], high: ["Highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)], long: ["Longest first", (a, b) => b.tokens - a.tokens], group: ["By group", (a, b) => a.group - b.group] };
  const ONLY = { all: ["All", () => true], wrong: ["Reward 0 or less", (r) => !(r.reward > 0)], right: ["Reward above 0", (r) => r.reward > 0], cut: ["Cut at the limit", (r) => r.finish === "length"], failed: ["Failed or dropped", (r) => r.failure || r.dropped] };
  function completions(step) {
    const list = h("div"), pager = h("div.bar.pager");
    const draw = () => {
      const text = ui.search.toLowerCase();
      const parts = (row) => [row.prompt, row.response, row.answer, row.id, ...(row.turns || []).map((turn) => turn.text)];
      const found = step.rows.filter((row) => ONLY[ui.only][1](row) && (!text || parts(row).some((part) => part?.toLowerCase().includes(text)))).sort(SORTS[ui.sort][1]);
      const last = Math.max(0, Math.ceil(found.length / PAGE) - 1), first = (ui.page = Math.min(ui.page, last)) * PAGE;
      const turn = (by, label, off) => h("button", { textContent: label, disabled: off, onclick: () => { ui.page += by; draw(); } });
      list.replaceChildren(...found.slice(first, first + PAGE).map(completion), ...(found.length ? [] : [h("div.card.empty.completion", { textContent: "No completion fits." })]));
      pager.replaceChildren(h("span.soft", { id: "range", textContent: found.length ? `${first + 1} to ${Math.min(first + PAGE, found.length)} of ${found.length}` : "" }), turn(-1, "Previous", !ui.page), turn(1, "Next", ui.page >= last));
    };
    const options = (table) => Object.entries(table).map(([key, [label]]) => [key, label]);
    const pick = (key) => (value) => { ui[key] = value; ui.page = 0; draw(); };
    const search = h("input", { type: "search", id: "search", placeholder: "Search prompts and responses", value: ui.search, oninput: () => pick("search")(search.value) });
    draw();
    return h("div.completions", {}, h("div.bar", {}, search, choice("only", options(ONLY), ui.only, pick("only")), choice("sort", options(SORTS), ui.sort, pick("sort"))), list, pager, h("p.soft", { textContent: data.limits }));
  }
  function completion(row) {
    const fact = (name, value) => value !== undefined && value !== null && value !== "" && h("span", {}, `${name} `, h("b", { textContent: value }));
    const rewards = Object.entries(row.rewards), read = Object.entries(row.read || {});
    const texts = row.turns || [{ role: "assistant", text: row.response, note: "" }];
    return h("article.completion.card", {},
      h("div.facts", {},
        h(`span.reward.${row.reward > 0 ? "good" : "bad"}`, { textContent: `reward ${format(row.reward)}` }),
        rewards.length > 1 && rewards.map(([name, value]) => fact(name, format(value))), fact("expected", row.answer), read.map(([name, text]) => fact(rewards.length > 1 ? `${name} read` : "read", text)),
        fact("tokens", row.tokens), fact("turns", row.turns?.filter((turn) => turn.role === "assistant").length), fact("end", row.finish), fact("failure", row.failure), row.dropped && fact("dropped", "yes"),
        fact("further conversations", row.branches), h("span", { textContent: row.id })),
      h("div.pair", {}, h("div", {}, h("p.part", { textContent: "Prompt" }), h("pre.text", { textContent: row.prompt })),
        h("div", {}, texts.map((turn) => [
          h("p.part", { textContent: row.turns ? [turn.role, turn.note].filter(Boolean).join(": ") : "Response" }),
          h(turn.role === "assistant" ? "pre.text" : "pre.text.other", { textContent: turn.text })]))));
  }

  // ---- facts, the frame of the page, updates

  const facts = h("section", { id: "facts" });
  function health(run) { // conditions of the run and what to do about each
    return h("div", {}, Object.entries(run.health).map(([name, text]) => h("p.note.advice", {}, h("b", { textContent: name }), ` ${text}`)));
  }
  function fold(title, count, open, ...children) { // stays open or closed when it is drawn again
    return h("details.card", { open: ui.folds[title] ?? open, ontoggle: (event) => { ui.folds[title] = event.target.open; } }, h("summary", {}, title, count && h("small", { textContent: count })), children);
  }
  function drawFacts() {
    const run = data.runs[ui.run];
    facts.replaceChildren(
      h("h2", { textContent: "What ran" }),
      data.runs.length > 1 ? health(run) : "",
      fold("Versions, machine, data", "", true, h("table", {}, run.facts.map(([name, value]) => h("tr", {}, h("th", { textContent: name }), h("td", { textContent: value }))))),
      run.warnings.length ? fold("Warnings in the log", run.warnings.length, false, run.warnings.map((text) => h("p.note.warning", { textContent: text }))) : "",
      fold("config.resolved.toml", "", false, h("pre", { textContent: run.config })));
  }
  function theme(name) {
    document.documentElement.style.colorScheme = name || "";
    colors = {};
    for (const each of plots) each.redraw(false);
  }
  function toggleTheme() {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
    theme(dark ? "light" : "dark");
    try { localStorage.setItem("engine-theme", dark ? "light" : "dark"); } catch { /* a file may have no storage */ }
  }
  function draw() {
    drawHead();
    drawMetrics();
    phases.draw();
    drawRollouts();
    drawFacts();
  }
  async function poll() {
    try {
      const answer = await fetch(`data.json?${data.tag}`);
      if (answer.status === 200) {
        const before = current(), old = before.set && JSON.stringify(before.set.steps[before.at]);
        data = await answer.json();
        const now = current();
        drawHead();
        drawMetrics();
        phases.draw();
        if (!now.set || !before.set || old !== JSON.stringify(now.set.steps[now.at]) || now.set.steps.length !== before.set.steps.length) drawRollouts();
        drawFacts();
      }
      document.getElementById("live").textContent = answer.ok ? "live" : "the runs cannot be read";
    } catch {
      document.getElementById("live").textContent = "not connected";
    }
    setTimeout(poll, 2000);
  }

  const filter = h("input", { type: "search", id: "filter", placeholder: "Filter metrics, such as reward or time/", oninput: () => { ui.filter = filter.value; filterMetrics(); } });
  const smooth = h("input", { type: "range", id: "smooth", min: 0, max: 0.98, step: 0.02, value: ui.smooth, oninput: () => { ui.smooth = +smooth.value; panels.forEach((panel) => panel.draw()); } });
  phases.element = h("section", { id: "phases" }, h("h2", { textContent: "Seconds of a step, by phase" }), h("div.panel.card", {}, phases.values, phases.place));
  root.append(
    h("div.head", {}, h("span.soft", {}, h("span", { id: "written" }), " ", live && h("span.badge.running", { id: "live", textContent: "live" })), h("nav", {}, [["metrics", "Metrics"], ["phases", "Phases"], ["rollouts", "Completions"], ["facts", "What ran"]].map(([id, text]) => h("a", { href: `#${id}`, textContent: text }))),
      h("button", { id: "theme", textContent: "◐ Theme", title: "Light or dark", onclick: toggleTheme })),
    head,
    h("div.bar.sticky", {}, filter, h("span.soft", { id: "count" }), h("label", {}, "Smoothing", smooth),
      data.runs.length > 1 && h("label", {}, "Details of", choice("run", data.runs.map((run, i) => [i, run.name]), 0, (value) => { ui.run = +value; ui.set = 0; ui.step = null; ui.page = 0; phases.draw(); drawRollouts(); drawFacts(); })),
      h("button", { id: "reset", textContent: "Reset zoom", disabled: true, onclick: () => zoomTo(null) })),
    metrics, phases.element, rollouts, facts);
  try { theme(localStorage.getItem("engine-theme")); } catch { /* as above */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.style.colorScheme));
  draw();
  if (live) poll();
})();
