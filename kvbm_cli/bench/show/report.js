"use strict";
// Draws the charts of the page from the JSON in #data. Every chart is drawn when its cell becomes visible, and again
// after a change of the colour scheme, the width or the medium.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const boxes = [...document.querySelectorAll(".chart")];
  const drawn = new Map();
  const escaped = echarts.format.encodeHTML;
  const PRINT_WIDTH = 640;
  const DASHES = ["solid", "dashed", "dotted"];
  const SYMBOLS = ["circle", "triangle", "rect", "diamond", "pin", "arrow"];

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const armColour = (arm) => colour(`arm-${arm % 6}`);
  const PARTS = ["client late", "queue", "first token", "generation"];

  const digits = (value) => {
    const size = Math.abs(value);
    const places = size >= 100 ? 0 : size >= 10 ? 1 : 2;
    return value.toLocaleString("en", { maximumFractionDigits: places }).replaceAll(",", "\u202f");
  };
  const short = (value) => (Math.abs(value) >= 1e6 ? `${value / 1e6}M` : Math.abs(value) >= 1e4 ? `${value / 1e3}k` : `${value}`);

  function axis(type, name, more = {}) {
    return {
      type, name, nameLocation: "middle", nameTextStyle: { color: colour("muted"), fontSize: 12 },
      axisLine: { lineStyle: { color: colour("muted") } }, axisTick: { lineStyle: { color: colour("muted") } },
      axisLabel: { color: colour("muted"), fontSize: 12, hideOverlap: true },
      splitLine: { lineStyle: { color: colour("grid") } }, minorTick: { show: false }, ...more,
    };
  }
  const across = (type, name, more = {}) => axis(type, name, { nameGap: 28, splitLine: { show: false }, ...more });
  const upwards = (type, name, more = {}) =>
    axis(type, name, { nameLocation: "end", nameGap: 12, nameTextStyle: { color: colour("muted"), fontSize: 12, align: "left", padding: [0, 0, 0, -48] }, axisLine: { show: false }, axisTick: { show: false }, ...more });

  const base = (more) => ({
    animation: false, backgroundColor: "transparent",
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("text") },
    grid: { left: 52, right: 20, top: 32, bottom: 46, outerBoundsMode: "none" },
    tooltip: {
      trigger: "axis", confine: true, backgroundColor: colour("raised"), borderColor: colour("line"),
      textStyle: { color: colour("text"), fontSize: 13 }, axisPointer: { lineStyle: { color: colour("muted") } },
    },
    ...more,
  });
  const lineStyle = (arm) => ({ color: armColour(arm), width: 2, type: DASHES[arm % 3] });
  const tick = (value) => short(Number(value.toPrecision(6)));
  const edges = (values) => {
    // Ends of a logarithmic axis: the nearest steps of the axis outside the values.
    const steps = (value, pick) => {
      const power = 10 ** Math.floor(Math.log10(value));
      return pick([1, 1.5, 2, 3, 4, 5, 7, 10].map((factor) => factor * power));
    };
    const low = Math.max(Math.min(...values), 1e-3), high = Math.max(Math.max(...values), low * 1.01);
    return {
      min: steps(low, (all) => all.filter((step) => step <= low * 1.0001).pop()),
      max: steps(high, (all) => all.find((step) => step >= high * 0.9999)),
    };
  };
  const logAxis = (make, name, values) => {
    const { min, max } = edges(values);
    const all = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power++)
      for (const factor of max / min <= 12 ? [1, 1.5, 2, 3, 4, 5, 7] : max / min <= 200 ? [1, 2, 5] : [1, 3]) {
        const value = Number((factor * 10 ** power).toPrecision(6));
        if (value >= min * 0.999 && value <= max * 1.001) all.push(value);
      }
    const logs = all.map((value) => Math.log10(value));
    const few = all.length > 12 ? logs.filter((_, i) => /^1/.test(all[i].toExponential())) : logs;
    return make("value", name, {
      min: Math.log10(min), max: Math.log10(max), scale: true,
      axisLabel: { color: colour("muted"), fontSize: 12, customValues: few, formatter: (log) => tick(10 ** log) },
      axisTick: { show: false, customValues: few },
      splitLine: { show: true, lineStyle: { color: colour("grid") } },
    });
  };
  const log = (value) => Math.log10(Math.max(value, 1e-3));
  const rows = (title, lines) =>
    `<b>${escaped(title)}</b><br>` + lines.map(([name, value]) => `${escaped(name)}: ${escaped(value)}`).join("<br>");

  // A line through the medians with a bar from low to high at every point.
  function withBars(arm, name, points, x, y) {
    const place = (point) => [x(point), y(point[2]), y(point[1]), y(point[3])];
    return [
      { type: "line", name, data: points.map((p) => [x(p), y(p[2])]), lineStyle: lineStyle(arm), itemStyle: { color: armColour(arm) }, symbol: SYMBOLS[arm % 6], symbolSize: 7 },
      {
        type: "custom", name, data: points.map(place), silent: true, encode: { x: 0, y: [1, 2, 3] }, z: 1,
        renderItem: (_, api) => {
          const [px, low] = api.coord([api.value(0), api.value(2)]);
          const high = api.coord([api.value(0), api.value(3)])[1];
          const style = { stroke: armColour(arm), lineWidth: 1.5, opacity: 0.75, fill: null };
          const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style });
          return { type: "group", children: [line(px, low, px, high), line(px - 4, low, px + 4, low), line(px - 4, high, px + 4, high)] };
        },
      },
    ];
  }

  const options = {
    turns(chart) {
      const turns = [...new Set(chart.arms.flatMap((arm) => arm.points.map((p) => p[0])))];
      const middle = (chart.arms.length - 1) / 2;
      const first = Math.min(...turns), last = Math.max(...turns);
      const apart = Math.min(0.09, (last - first + 1) * 0.012);
      return base({
        xAxis: across("value", "turn", { min: first - 0.5, max: last + 0.5, axisLabel: { color: colour("muted"), customValues: thin(turns, 12) }, axisTick: { customValues: thin(turns, 12), lineStyle: { color: colour("muted") } } }),
        yAxis: upwards("value", "ms", { min: 0, axisLabel: { color: colour("muted"), formatter: tick } }),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => { const p = chart.arms[Math.floor(at.seriesIndex / 2)].points[at.dataIndex]; return rows(`${at.seriesName}, turn ${p[0]}`, [["lower quartile", `${digits(p[1])} ms`], ["median", `${digits(p[2])} ms`], ["upper quartile", `${digits(p[3])} ms`]]); } },
        series: chart.arms.flatMap((arm, index) => withBars(arm.arm, data.arms[arm.arm], arm.points, (p) => p[0] + (index - middle) * apart, (v) => v)),
      });
    },
    sources(chart) {
      const values = chart.arms.flatMap((arm) => arm.boxes.flatMap((box) => box ?? []));
      return base({
        xAxis: across("category", "source of most prompt tokens", { data: chart.sources, axisTick: { show: false } }),
        yAxis: logAxis(upwards, "ms", values),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => { const box = chart.arms[at.seriesIndex].boxes[at.dataIndex]; return box ? rows(`${at.seriesName}, ${chart.sources[at.dataIndex]}`, ["5%", "lower quartile", "median", "upper quartile", "95%"].map((name, i) => [name, `${digits(box[i])} ms`])) : ""; } },
        series: chart.arms.map((arm) => ({
          type: "boxplot", name: data.arms[arm.arm], boxWidth: [8, 36], data: arm.boxes.map((box) => (box ? box.map(log) : ["-", "-", "-", "-", "-"])),
          itemStyle: { color: echarts.color.modifyAlpha(armColour(arm.arm), 0.22), borderColor: armColour(arm.arm), borderWidth: 1.5 },
        })),
      });
    },
    ecdf(chart) {
      const values = chart.arms.flatMap((arm) => arm.points.map((p) => p[0]));
      return base({
        xAxis: logAxis(across, "ms", values),
        yAxis: upwards("value", "share of requests", { min: 0, max: 1, interval: 0.25, axisLabel: { color: colour("muted"), formatter: (v) => `${Math.round(v * 100)}%` } }),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => rows(at.seriesName, [[`${Math.round(at.value[1] * 1000) / 10}% within`, `${digits(10 ** at.value[0])} ms`]]) },
        series: chart.arms.map((arm) => ({
          type: "line", step: "end", name: data.arms[arm.arm], showSymbol: true, symbolSize: 8, symbol: "circle",
          itemStyle: { color: armColour(arm.arm), opacity: 0 }, emphasis: { itemStyle: { opacity: 1 } }, lineStyle: lineStyle(arm.arm), cursor: "default",
          data: [[log(arm.points[0][0]), 0], ...arm.points.map((p) => [log(p[0]), p[1]])],
        })),
      });
    },
    timeline(chart) {
      const times = chart.arms.flatMap((arm) => arm.points.map((p) => p[0])), values = chart.arms.flatMap((arm) => arm.points.map((p) => p[1]));
      return base({
        xAxis: across("value", "seconds since the start of the run", { min: 0, max: Math.ceil(Math.max(...times)), axisLabel: { color: colour("muted"), showMaxLabel: false } }),
        yAxis: logAxis(upwards, "TTFT, ms", values),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => rows(at.seriesName, [["launched at", `${digits(at.value[0])} s`], ["first token after", `${digits(10 ** at.value[1])} ms`]]) },
        series: chart.arms.map((arm) => ({
          type: "scatter", name: data.arms[arm.arm], data: arm.points.map((p) => [p[0], log(p[1])]), symbol: SYMBOLS[arm.arm % 6],
          symbolSize: values.length > 900 ? 4 : 6, itemStyle: { color: armColour(arm.arm), opacity: 0.75 },
        })),
      });
    },
    ladder(chart) {
      const pressures = chart.lines.flatMap((line) => line.points.map((p) => p[0]));
      const margin = (Math.max(...pressures) - Math.min(...pressures) || 1) * 0.08;
      const all = [...new Set(pressures)].sort((a, b) => a - b);
      const series = chart.lines.flatMap((line) => withBars(line.arm, "", line.points, (p) => p[0], (v) => v));
      series[0].markLine = { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colour("muted"), type: "solid" }, data: [{ yAxis: 1 }] };
      return base({
        xAxis: across("value", "pressure (working set / G1)", { min: Math.min(...pressures) - margin, max: Math.max(...pressures) + margin, axisLabel: { color: colour("muted"), customValues: all, formatter: (v) => `${Number(v.toPrecision(4))}` }, axisTick: { customValues: all, lineStyle: { color: colour("muted") } } }),
        yAxis: upwards("value", "times faster", { min: 0, axisLabel: { color: colour("muted"), formatter: (v) => `${v}×` } }),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => { const p = chart.lines[Math.floor(at.seriesIndex / 2)].points[at.dataIndex]; return rows(`pressure ${p[0]}`, [["speed-up", digits(p[2])], ["95% interval", `${digits(p[1])} to ${digits(p[3])}`]]); } },
        series,
      });
    },
    pareto(chart) {
      const ys = chart.lines.flatMap((line) => line.points.map((p) => p[1]));
      return base({
        xAxis: across("value", chart.x, { min: 0, axisLabel: { color: colour("muted"), formatter: tick, hideOverlap: true } }),
        yAxis: logAxis(upwards, chart.y, ys),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => rows(at.seriesName, [[chart.x, digits(at.value[0])], [chart.y.replace(", ms", ""), `${digits(10 ** at.value[1])} ms`]]) },
        series: chart.lines.map((line) => ({ type: "line", name: data.arms[line.arm], data: line.points.map((p) => [p[0], log(p[1])]), lineStyle: lineStyle(line.arm), itemStyle: { color: armColour(line.arm) }, symbol: SYMBOLS[line.arm % 6], symbolSize: 7 })),
      });
    },
    parts(chart, box) {
      const names = chart.arms.map((arm) => (box.clientWidth < 500 && arm.length > 14 ? `${arm.slice(0, 13)}…` : arm));
      const left = Math.min(180, 20 + 8 * Math.max(...names.map((name) => name.length)));
      return base({
        grid: { left, right: 24, top: 8, bottom: 46, outerBoundsMode: "none" },
        xAxis: across("value", "ms", { splitLine: { show: true, lineStyle: { color: colour("grid") } }, axisLabel: { color: colour("muted"), formatter: tick, hideOverlap: true } }),
        yAxis: axis("category", "", { data: names, inverse: true, splitLine: { show: false }, axisTick: { show: false }, axisLabel: { color: colour("text"), fontSize: 13, width: left - 16, overflow: "truncate" } }),
        tooltip: { ...base({}).tooltip, trigger: "item", formatter: (at) => rows(`${chart.arms[at.dataIndex]}`, [[at.seriesName, `${digits(at.value)} ms`]]) },
        series: chart.parts.map((part, column) => ({ type: "bar", stack: "time", name: PARTS[part], barMaxWidth: 26, data: chart.rows.map((row) => row[column] ?? 0), itemStyle: { color: colour(`part-${part}`), borderColor: colour("page"), borderWidth: 0.5 } })),
      });
    },
  };

  function thin(values, most) {
    const step = Math.ceil(values.length / most);
    return values.sort((a, b) => a - b).filter((_, index) => index % step === 0);
  }

  function draw(box) {
    const chart = JSON.parse(box.dataset.chart);
    const kept = drawn.get(box) ?? echarts.init(box, null, { renderer: "svg" });
    drawn.set(box, kept);
    kept.setOption(options[chart.kind](chart, box), true);
  }
  const isShown = (box) => box.getClientRects().length > 0;
  const drawShown = () => boxes.filter(isShown).forEach(draw);
  const redraw = () => boxes.filter((box) => drawn.has(box) && isShown(box)).forEach(draw);

  function select(cells, selector, chosen) {
    cells.forEach((cell) => (cell.hidden = chosen !== "all" && cell.id !== chosen));
    selector.value = chosen;
    drawShown();
  }

  function addSelector() {
    const cells = [...document.querySelectorAll(".cell")];
    if (cells.length < 2) return;
    const bar = document.createElement("div"), label = document.createElement("label"), selector = document.createElement("select");
    bar.className = "selector";
    label.textContent = "Workload";
    label.htmlFor = selector.id = "workload";
    for (const [value, name] of [...cells.map((cell) => [cell.id, cell.dataset.name]), ["all", `All ${cells.length} workloads`]]) selector.add(new Option(name, value));
    bar.append(label, selector);
    document.querySelector(".cells").before(bar);
    const fromAddress = () => cells.find((cell) => `#${cell.id}` === location.hash)?.id;
    selector.addEventListener("change", () => select(cells, selector, selector.value));
    addEventListener("hashchange", () => { const id = fromAddress(); if (id) { select(cells, selector, id); document.getElementById(id).scrollIntoView(); } });
    select(cells, selector, fromAddress() ?? cells[0].id);
  }

  function onPaper() {
    if (root.classList.contains("light")) return;
    root.classList.add("light");
    document.querySelectorAll(".cell[hidden]").forEach((cell) => { cell.dataset.wasHidden = ""; cell.hidden = false; });
    boxes.forEach((box) => { box.style.width = `${PRINT_WIDTH}px`; draw(box); drawn.get(box).resize({ width: PRINT_WIDTH }); draw(box); });
  }
  function onScreen() {
    if (!root.classList.contains("light")) return;
    root.classList.remove("light");
    document.querySelectorAll("[data-was-hidden]").forEach((cell) => { cell.hidden = true; delete cell.dataset.wasHidden; });
    boxes.forEach((box) => { box.style.width = ""; });
    drawn.forEach((chart, box) => { if (isShown(box)) { chart.resize({ width: "auto" }); draw(box); } });
  }

  root.classList.add("scripted");
  document.querySelectorAll("details").forEach((one) => (one.open = false));
  addSelector();
  drawShown();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const paper = matchMedia("print");
  paper.addEventListener("change", () => (paper.matches ? onPaper() : onScreen()));
  addEventListener("beforeprint", onPaper);
  addEventListener("afterprint", onScreen);
  let waiting;
  new ResizeObserver(() => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { if (!root.classList.contains("light")) drawn.forEach((chart, box) => { if (isShown(box)) { chart.resize(); draw(box); } }); });
  }).observe(document.querySelector("main"));
  root.dataset.ready = "true";
})();
