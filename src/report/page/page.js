/* Builds a page from the JSON in it. Everything that comes from a run enters by textContent or as the source of an
 * image, so that no text of a run can become markup. Charts share one step: what is hovered in one is read in all. */
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  const charts = [];

  function element(parent, name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    parent.appendChild(made);
    return made;
  }

  function shape(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function number(value, unit) {
    if (value === null) return "–";
    if (unit === "bytes") return bytes(value);
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 999.5e12) return value.toExponential(2).replace(/\.?0+e\+/, "e");
    for (const unit of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= Math.max(1e4, 0.9995 * unit[0])) return Number((value / unit[0]).toPrecision(3)) + unit[1];
    if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(5)));
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) {
      value /= 1024;
      at++;
    }
    return (at ? Number(value.toPrecision(3)) : value) + " " + units[at];
  }

  /* ---- charts ---- */

  /* Round numbers between two; of bytes, round numbers of the unit they are written in. */
  function ticks(low, high, wanted, unit) {
    if (unit === "bytes" && high > 0) {
      const scale = Math.pow(1024, Math.max(0, Math.floor(Math.log(high / 1000 * 1024) / Math.log(1024))));
      return ticks(low / scale, high / scale, wanted).map(function (tick) { return tick * scale; });
    }
    const rough = (high - low) / wanted, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = power * (rough / power > 5 ? 10 : rough / power > 2 ? 5 : rough / power > 1 ? 2 : 1);
    const list = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) list.push(Number((i * step).toPrecision(12)));
    return list;
  }

  /* Logarithms of round numbers: within a decade or so evenly spaced ones, else powers of ten. */
  function logTicks(low, high) {
    if (high - low < 1.2) return ticks(Math.pow(10, low), Math.pow(10, high), 4).filter(function (tick) { return tick > 0; }).map(Math.log10);
    const list = [], every = Math.max(1, Math.ceil((high - low) / 5));
    for (let e = Math.ceil(low); e <= high; e += every) list.push(e);
    return list;
  }

  /* The place in x that is nearest to the step. */
  function nearest(x, step) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] < step) low = middle;
      else high = middle;
    }
    return Math.abs(x[low] - step) <= Math.abs(x[high] - step) ? low : high;
  }

  function extent(spec, log) {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const curve of spec.curves) {
      first = Math.min(first, curve.x[0]);
      last = Math.max(last, curve.last[0]);
      for (const list of [curve.mean, curve.low, curve.high])
        for (const value of list || [])
          if (value !== null && (!log || value > 0)) {
            low = Math.min(low, value);
            high = Math.max(high, value);
          }
    }
    if (low > high) { low = 0; high = 1; }
    if (log) { low = Math.log10(low); high = Math.log10(high); }
    if (spec.zero && !log) low = Math.min(low, 0);
    const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.05 || 0.5;
    if (!(spec.zero && !log && low === 0)) low -= room;
    return { low: low, high: high + room, first: first, last: last };
  }

  function draw(chart) {
    const spec = chart.spec, svg = chart.svg, width = Math.max(svg.clientWidth, 200), height = 210;
    const e = extent(spec, chart.log), left = spec.unit === "bytes" ? 64 : 52, right = width - 10, top = 10, bottom = height - 24;
    const across = e.last > e.first ? (right - left) / (e.last - e.first) : 0;
    chart.x = function (step) { return across ? left + (step - e.first) * across : (left + right) / 2; };
    chart.step = function (x) { return across ? e.first + (x - left) / across : e.first; };
    chart.y = function (value) {
      const at = chart.log ? Math.log10(value) : value;
      return bottom - (at - e.low) / (e.high - e.low) * (bottom - top);
    };
    const drawable = function (value) { return value !== null && (!chart.log || value > 0); };
    svg.replaceChildren();
    svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    svg.setAttribute("height", height);
    for (const tick of chart.log ? logTicks(e.low, e.high) : ticks(e.low, e.high, 4, spec.unit)) {
      const y = bottom - (tick - e.low) / (e.high - e.low) * (bottom - top);
      shape(svg, "path", { d: "M" + left + " " + y + "H" + right, stroke: "var(--grid)" });
      shape(svg, "text", { x: left - 7, y: y + 4, "text-anchor": "end" }, number(chart.log ? Number(Math.pow(10, tick).toPrecision(6)) : tick, spec.unit));
    }
    const steps = e.last > e.first ? ticks(e.first, e.last, Math.max(2, width / 110)) : [e.first];
    for (const step of steps.filter(Number.isInteger))
      shape(svg, "text", { x: chart.x(step), y: height - 6, "text-anchor": chart.x(step) > right - 16 ? "end" : "middle" }, number(step));
    for (const mark of (spec.marks || []).filter(function (mark) { return mark.x >= e.first && mark.x <= e.last; }))
      shape(shape(svg, "path", { d: "M" + chart.x(mark.x) + " " + top + "V" + bottom, stroke: mark.bad ? "var(--bad)" : "var(--soft)",
        "stroke-dasharray": mark.bad ? "none" : "3 3", "class": "mark" }), "title", {}, mark.text);
    spec.curves.forEach(function (curve) {
      const colour = "var(--c" + curve.colour + ")";
      let line = "", pen = false, alone = 0;
      if (curve.low) {
        let upper = "", lower = "", any = false;
        curve.x.forEach(function (step, i) {
          if (!drawable(curve.low[i]) || !drawable(curve.high[i])) return;
          upper += (any ? "L" : "M") + chart.x(step).toFixed(1) + " " + chart.y(curve.high[i]).toFixed(1);
          lower = "L" + chart.x(step).toFixed(1) + " " + chart.y(curve.low[i]).toFixed(1) + lower;
          any = true;
        });
        if (any) shape(svg, "path", { d: upper + lower + "Z", fill: colour, opacity: 0.25, "class": "band" });
      }
      curve.x.forEach(function (step, i) {
        if (!drawable(curve.mean[i])) { pen = false; return; }
        line += (pen ? "L" : "M") + chart.x(step).toFixed(1) + " " + chart.y(curve.mean[i]).toFixed(1);
        if (!pen && !drawable(i + 1 < curve.x.length ? curve.mean[i + 1] : null) && alone++ < 500)
          shape(svg, "circle", { cx: chart.x(step), cy: chart.y(curve.mean[i]), r: 2.5, fill: colour });
        pen = true;
      });
      shape(svg, "path", { d: line, fill: "none", stroke: colour, "stroke-width": 1.6, "stroke-linejoin": "round",
        "stroke-dasharray": curve.dashed ? "5 4" : "none", "class": "curve" });
    });
    chart.over = shape(svg, "g", { "class": "over" });
    read(chart, chart.shown);
  }

  /* Whether a logarithmic scale has anything to show. */
  function hasPositive(spec) {
    return spec.curves.some(function (curve) { return curve.mean.some(function (value) { return value > 0; }); });
  }

  function longestOf(spec) {
    return spec.curves.reduce(function (a, b) { return b.x.length > a.x.length ? b : a; });
  }

  /* The curve's place for a step of the chart: of curves that have fewer steps the nearest one, and beyond their ends
   * none. */
  function placeOf(curve, step, longest) {
    const i = nearest(curve.x, step), x = longest.x, apart = x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) : 0;
    const outside = step < curve.x[0] - apart || step > curve.last[0] + apart;
    return { i: i, inside: !outside, exact: Math.abs(curve.x[i] - step) <= apart / 2 };
  }

  /* The values at a step, or without one the last ones. */
  function read(chart, step) {
    const spec = chart.spec, end = step === undefined, longest = longestOf(spec);
    const latest = Math.max.apply(null, spec.curves.map(function (curve) { return curve.last[0]; }));
    const here = end ? latest : longest.x[nearest(longest.x, step)];
    chart.shown = step;
    chart.over.replaceChildren();
    chart.out.replaceChildren();
    element(chart.out, "span", (end ? "last, step " : "step ") + here);
    if (!end) shape(chart.over, "path", { d: "M" + chart.x(here) + " 10V186", stroke: "var(--soft)" });
    for (const curve of spec.curves) {
      const at = placeOf(curve, here, longest), i = at.i, span = element(chart.out, "span");
      const value = end ? curve.last[1] : at.inside ? curve.mean[i] : null;
      element(span, "i", "", "key").style.background = "var(--c" + curve.colour + ")";
      element(span, "span", curve.name + " ");
      element(span, "b", number(value, spec.unit));
      if (end ? curve.last[0] !== here : value !== null && !at.exact) element(span, "span", " at " + (end ? curve.last[0] : curve.x[i]));
      if (!end && curve.low && value !== null && curve.low[i] !== curve.high[i])
        element(span, "span", " (" + number(curve.low[i], spec.unit) + " – " + number(curve.high[i], spec.unit) + ")");
      if (!end && value !== null && (!chart.log || value > 0))
        shape(chart.over, "circle", { cx: chart.x(curve.x[i]), cy: chart.y(value), r: 4, fill: "var(--c" + curve.colour + ")", stroke: "var(--card)" });
    }
  }

  function readAll(step) {
    for (const chart of charts) read(chart, step);
  }

  function addChart(parent, spec) {
    const box = element(parent, "section", undefined, "chart"), head = element(box, "header");
    element(head, "h3", spec.title);
    const chart = { spec: spec, log: Boolean(spec.log) && hasPositive(spec) };
    const positive = spec.curves.every(function (curve) { return curve.mean.every(function (value) { return value === null || value > 0; }); });
    if (hasPositive(spec) && (positive || spec.log)) {
      const button = element(head, "button", "log");
      button.type = "button";
      button.setAttribute("aria-label", "logarithmic scale of " + spec.title);
      button.setAttribute("aria-pressed", chart.log);
      button.addEventListener("click", function () {
        chart.log = !chart.log;
        button.setAttribute("aria-pressed", chart.log);
        draw(chart);
      });
    }
    chart.out = element(box, "div", undefined, "read");
    chart.svg = shape(box, "svg", { role: "img", tabindex: 0, "aria-label": spec.title + " over the steps; arrow keys move" });
    charts.push(chart);
    const follow = function (event) {
      const box = chart.svg.getBoundingClientRect();
      readAll(chart.step(event.clientX - box.left));
    };
    chart.svg.addEventListener("pointermove", follow);
    chart.svg.addEventListener("pointerdown", follow);
    /* What a finger has touched stays when it is lifted: it is in the way of reading until then. */
    chart.svg.addEventListener("pointerleave", function (event) { if (event.pointerType !== "touch") readAll(undefined); });
    chart.svg.addEventListener("keydown", function (event) {
      const x = longestOf(spec).x, end = x.length - 1, at = chart.shown === undefined ? end : nearest(x, chart.shown);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - Math.ceil(end / 10), PageDown: at + Math.ceil(end / 10), Home: 0, End: end }[event.key];
      if (to === undefined) return;
      readAll(x[Math.max(0, Math.min(end, to))]);
      event.preventDefault();
    });
    chart.svg.addEventListener("blur", function () { readAll(undefined); });
  }

  /* ---- sections ---- */

  function heading(text, note) {
    element(main, "h2", text);
    if (note) element(main, "p", note, "soft");
  }

  function addHead() {
    const head = element(main, "header");
    element(head, "h1", data.title);
    if (data.badge) element(head, "span", data.badge.text, "badge " + data.badge.tone);
    if (data.lead) element(head, "p", data.lead, "lead");
    if (data.facts && data.facts.length) {
      const tiles = element(main, "dl", undefined, "tiles");
      tiles.style.margin = 0;
      for (const fact of data.facts) {
        const tile = element(tiles, "div", undefined, "tile");
        element(tile, "dt", fact[0]);
        const value = element(tile, "dd", fact[1]);
        if (fact[2]) element(value, "small", fact[2]);
      }
      /* The last row's empty places would show the ground of the lines. */
      const fill = function () {
        tiles.querySelectorAll(".filler").forEach(function (filler) { filler.remove(); });
        const columns = getComputedStyle(tiles).gridTemplateColumns.split(" ").filter(function (width) { return width !== "0px"; }).length;
        for (let i = data.facts.length % columns; i > 0 && i < columns && columns <= data.facts.length; i++) element(tiles, "div", undefined, "tile filler");
      };
      fill();
      window.addEventListener("resize", fill);
    }
    if (data.warnings && data.warnings.length) {
      const list = element(main, "ul", undefined, "warnings");
      for (const warning of data.warnings) element(list, "li", warning);
    }
  }

  function addCharts() {
    if (!data.charts || !data.charts.length) return;
    heading("Curves");
    const grid = element(main, "div", undefined, "charts");
    for (const spec of data.charts) addChart(grid, spec);
    charts.forEach(draw); /* the width of one is known when all are there */
    let wide = main.clientWidth;
    document.addEventListener("pointerdown", function (event) {
      if (event.pointerType === "touch" && !event.target.closest(".chart svg")) readAll(undefined);
    });
    window.addEventListener("resize", function () {
      if (main.clientWidth !== wide) charts.forEach(draw);
      wide = main.clientWidth;
    });
  }

  function sum(list) {
    return list.reduce(function (a, b) { return a + (b || 0); }, 0);
  }

  function addMemory() {
    const memory = data.memory;
    if (!memory) return;
    heading("Memory", memory.note);
    const legend = element(main, "div", undefined, "legend");
    memory.kinds.forEach(function (kind, i) {
      const item = element(legend, "span");
      element(item, "i", "", "key").style.background = "var(--c" + i + ")";
      element(item, "span", kind);
    });
    const most = Math.max.apply(null, memory.ranks.map(function (rank) { return Math.max(sum(rank.bytes), sum(rank.planned || [])); }));
    const grid = element(main, "div", undefined, "memory");
    for (const rank of memory.ranks) {
      element(grid, "span", rank.name);
      const bar = element(grid, "div", undefined, "bar");
      rank.bytes.forEach(function (size, i) {
        if (!size) return;
        const part = element(bar, "i");
        part.style.width = 100 * size / most + "%";
        part.style.background = "var(--c" + i + ")";
        part.title = memory.kinds[i] + " " + bytes(size);
      });
      let text = bytes(sum(rank.bytes));
      if (rank.planned) {
        const mark = element(bar, "u");
        mark.style.left = "calc(" + 100 * sum(rank.planned) / most + "% - 1px)";
        mark.title = "plan " + bytes(sum(rank.planned));
        text += " of " + bytes(sum(rank.planned)) + " planned";
      }
      element(grid, "span", text, "held");
    }
  }

  function addTimeline() {
    if (!data.timeline) return;
    heading("Pipeline, as it ran");
    const image = element(element(main, "div", undefined, "wide"), "img");
    image.alt = "Timeline of the pipeline's stages";
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(data.timeline);
  }

  function addRankMap() {
    const map = document.querySelector("svg.rank-map");
    if (!map) return;
    if (!map.querySelector(".rm-cell")) {
      map.remove();
      heading("Ranks", "Every rank is alone in its groups.");
      return;
    }
    heading("Ranks", "Each panel is one kind of group; ranks of one colour are in one group. Pick a rank to see all its groups.");
    const form = element(main, "div", undefined, "pick"), label = element(form, "label", "Rank "), input = element(label, "input");
    input.type = "number";
    input.min = 0;
    const cells = Array.from(map.querySelectorAll(".rm-cell")), clear = element(form, "button", "none");
    input.max = Math.max.apply(null, cells.map(function (cell) { return Number(cell.dataset.r); }));
    const says = element(form, "span", "", "groups");
    clear.type = "button";
    const pick = function (rank) {
      let found = false;
      says.replaceChildren();
      map.querySelectorAll(".rm-panel").forEach(function (panel) {
        const list = Array.from(panel.querySelectorAll(".rm-cell"));
        const own = list.find(function (cell) { return Number(cell.dataset.r) === rank; });
        const members = list.filter(function (cell) { return own && own.dataset.g !== "-1" && cell.dataset.g === own.dataset.g; });
        for (const cell of list) {
          cell.classList.toggle("rm-off", Boolean(own) && cell !== own && !members.includes(cell));
          cell.classList.toggle("rm-picked", cell === own);
        }
        found = found || Boolean(own);
        if (!members.length) return;
        const group = element(says, "span");
        element(group, "b", panel.dataset.kind);
        element(group, "span", members.length > 16 ? " of " + members.length : " {" + members.map(function (cell) { return cell.dataset.r; }).join(", ") + "}");
      });
      input.value = found ? rank : "";
    };
    for (const cell of cells) cell.addEventListener("click", function () { pick(Number(cell.dataset.r)); });
    input.addEventListener("input", function () { if (input.value !== "") pick(Number(input.value)); });
    clear.addEventListener("click", function () { pick(-1); });
    element(main, "div", undefined, "wide").appendChild(map);
    if (data.rank >= 0) pick(data.rank);
  }

  function addRows() {
    if (!data.rows || !data.rows.length) return;
    heading(data.rowsTitle);
    const table = element(element(main, "div", undefined, "wide"), "table");
    data.rows.forEach(function (row, i) {
      const line = element(table, "tr");
      row.forEach(function (text) { element(line, i ? "td" : "th", text); });
    });
  }

  function addConfig() {
    if (!data.config) return;
    heading("Configuration");
    const box = element(element(main, "div", undefined, "wide"), "details");
    element(box, "summary", "run.yaml, as understood, with every default");
    element(box, "pre", data.config);
  }

  addHead();
  addCharts();
  addMemory();
  addTimeline();
  addRankMap();
  addRows();
  addConfig();
  element(main, "footer", data.footer);
})();
