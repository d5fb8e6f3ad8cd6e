"use strict";
// Paints the charts of #data. One view (first microsecond, microseconds shown) is shared by all timelines of a plan, so
// that what stands in one column of two of them happened at the same time. All text goes through canvas or textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 240, HEAD = 20, MIN_SPAN = 1;
const tip = document.getElementById("tip");
const format = us => us < 1e-3 ? "0" : us >= 1000 ? (us / 1000).toPrecision(4) + " ms" : us.toPrecision(3) + " us";
const bytes = n => { let i = 0; while (n >= 1024 && i < 4) { n /= 1024; i++; } return n.toPrecision(3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][i]; };

// "2F0a" as everywhere: stage, what it is, micro-batch, half; "" for what is no task.
const task = bar => data.kinds[bar[2]].letter && bar[3] + data.kinds[bar[2]].letter + bar[4] + (bar[5] >= 0 ? "ab"[bar[5]] : "");

function describe(plan, bar) {
  const [, long, kind, stage, microBatch, half = -1, edge, size, peer] = bar, what = data.kinds[kind].name, name = task(bar);
  const own = stage < 0 ? {} : plan.stages[stage], of = data.kinds[kind].letter === "F" ? own.forward : own.name;
  if (name) return `${name} ${what} of ${of}, micro-batch ${microBatch}${half >= 0 ? ", half " + half : ""} of ${plan.stages[stage].size} samples, ${format(long)}`;
  if (edge < 0) return `${what} of ${plan.stages[stage].name}${size ? ", " + bytes(size) : ""}, ${format(long)}`;
  return `${what} on ${plan.edges[edge]}${peer >= 0 ? " with rank " + peer : ""}, micro-batch ${microBatch}${size ? ", " + bytes(size) : ""}, ${format(long)}`;
}

class Chart {
  constructor(canvas, plan, chart, view, isMemory) {
    Object.assign(this, { canvas, plan, chart, view, isMemory });
    this.rows = isMemory ? chart.rows.filter(row => row.memory.length) : chart.rows;
    this.most = Math.max(1, ...this.rows.map(row => Math.max(row.limit, ...row.memory.map(step => step[1]))));
    this.pitch = this.rows.length > 16 ? 22 : 28;
    view.charts.push(this);
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.shiftKey && !event.metaKey) return;
      event.preventDefault();
      view.zoom(Math.exp((event.deltaY || event.deltaX) / 300), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => { this.held = event.clientX; canvas.setPointerCapture(event.pointerId); canvas.classList.add("moving"); });
    canvas.addEventListener("pointerup", () => { this.held = undefined; canvas.classList.remove("moving"); });
    canvas.addEventListener("pointermove", event => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    canvas.addEventListener("dblclick", event => view.zoom(0.5, this.time(event.offsetX)));
  }
  get scale() { return (this.canvas.clientWidth - LEFT - 8) / this.view.span; }
  time(x) { return this.view.start + (x - LEFT) / this.scale; }
  point(event) {
    if (this.held !== undefined) {
      this.view.move((this.held - event.clientX) / this.scale);
      this.held = event.clientX;
      return;
    }
    const row = this.rows[Math.floor((event.offsetY - HEAD) / this.pitch)], at = this.time(event.offsetX);
    const text = row && event.offsetX > LEFT ? (this.isMemory ? this.heldAt(row, at) : this.barAt(row, at, (event.offsetY - HEAD) % this.pitch)) : row ? row.name : "";
    tip.style.display = text ? "block" : "none";
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 12, innerWidth - 360) + "px";
    tip.style.top = event.clientY + 14 + "px";
  }
  barAt(row, at, y) {
    const track = y < this.pitch - 10 ? 0 : y < this.pitch - 6 ? 1 : 2;
    const bar = row.bars.find(b => data.kinds[b[2]].track === track && b[0] <= at && at < b[0] + b[1]);
    return bar ? describe(this.plan, bar) : track === 0 && at >= 0 && at < this.chart.duration ? "idle" : "";
  }
  heldAt(row, at) {
    let held = 0;
    for (const [time, value] of row.memory) if (time <= at) held = value; else break;
    return `rank ${row.rank} holds ${bytes(held)}${row.limit ? " of " + bytes(row.limit) : ""} at ${format(Math.max(at, 0))}`;
  }
  draw() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth, height = HEAD + this.rows.length * this.pitch + 4;
    this.canvas.style.height = height + "px";
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px ui-monospace, monospace";
    this.ruler(pen, width, height);
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - 8, height); pen.clip();
    this.rows.forEach((row, index) => (this.isMemory ? this.area(pen, row, index) : this.bars(pen, row, index)));
    pen.restore();
    pen.textAlign = "right"; pen.fillStyle = "#1d2733";
    this.rows.forEach((row, index) => pen.fillText(this.isMemory ? row.held : row.label, LEFT - 8, HEAD + index * this.pitch + 12));
  }
  ruler(pen, width, height) {
    const rough = this.view.span / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    pen.textAlign = "left";
    for (let t = Math.ceil(this.view.start / step) * step; t <= this.view.start + this.view.span; t += step) {
      const x = LEFT + (t - this.view.start) * this.scale;
      pen.fillStyle = "#eceff3"; pen.fillRect(x, HEAD - 6, 1, height);
      if (x + 60 < width) { pen.fillStyle = "#51606f"; pen.fillText(format(Math.max(t, 0)), x + 2, 11); }
    }
  }
  bars(pen, row, index) {
    const top = HEAD + index * this.pitch, thick = this.pitch - 12, scale = this.scale, start = this.view.start;
    pen.fillStyle = data.idle; pen.fillRect(LEFT - start * scale, top, this.chart.duration * scale, thick);
    pen.textAlign = "center";
    for (const bar of row.bars) {
      const kind = data.kinds[bar[2]], x = LEFT + (bar[0] - start) * scale, long = bar[1] * scale;
      if (x + long < LEFT || bar[0] > start + this.view.span) continue;
      pen.fillStyle = kind.colour;
      if (kind.track) { pen.fillRect(x, top + thick + (kind.track - 1) * 4, Math.max(long, 0.5), 3.5); continue; }
      pen.fillRect(x, top, Math.max(long - 0.5, 0.5), thick);
      if (!kind.letter) continue;
      const text = long > 55 ? `${task(bar)} (${this.plan.stages[bar[3]].size})` : String(bar[4]);
      if (long > 7 * text.length + 2) { pen.fillStyle = "#fff"; pen.fillText(text, x + long / 2, top + thick / 2 + 4); }
    }
  }
  area(pen, row, index) {
    const bottom = HEAD + (index + 1) * this.pitch - 3, high = this.pitch - 5, scale = this.scale;
    const x = time => LEFT + (Math.max(time, 0) - this.view.start) * scale, y = held => bottom - high * held / this.most;
    pen.beginPath(); pen.moveTo(x(0), bottom);
    let held = 0;
    for (const [time, value] of row.memory) { pen.lineTo(x(time), y(held)); pen.lineTo(x(time), y(value)); held = value; }
    pen.lineTo(x(this.chart.duration), y(held)); pen.lineTo(x(this.chart.duration), bottom); pen.closePath();
    pen.fillStyle = row.limit && Math.max(...row.memory.map(step => step[1])) > row.limit ? "#e8a090" : data.memory; pen.fill();
    if (row.limit) { pen.fillStyle = data.limit; pen.fillRect(x(0), y(row.limit), this.chart.duration * scale, 1); }
  }
}

class View {
  constructor(span) { this.whole = span || 1; this.start = 0; this.span = this.whole; this.charts = []; }
  zoom(factor, at) {
    const span = Math.min(Math.max(this.span * factor, MIN_SPAN), this.whole);
    this.start = at - (at - this.start) * span / this.span; this.span = span; this.move(0);
  }
  move(by) { this.start = Math.min(Math.max(this.start + by, 0), this.whole - this.span); this.draw(); }
  draw() { for (const chart of this.charts) chart.draw(); }
}

const views = data.plans.map((plan, number) => {
  const view = new View(Math.max(...plan.charts.map(chart => chart.duration), 0));
  plan.charts.forEach((chart, index) => {
    for (const [name, isMemory] of [["bars", false], ["memory", true]]) {
      const canvas = document.getElementById(`${name}-${number}-${index}`);
      if (canvas) new Chart(canvas, plan, chart, view, isMemory);
    }
  });
  const middle = () => view.start + view.span / 2;
  const actions = { in: () => view.zoom(0.5, middle()), out: () => view.zoom(2, middle()), all: () => view.zoom(1e9, 0), left: () => view.move(-view.span / 4), right: () => view.move(view.span / 4) };
  document.querySelectorAll(`[data-plan="${number}"]`).forEach(button => button.addEventListener("click", actions[button.dataset.action]));
  view.draw();
  return view;
});
addEventListener("resize", () => views.forEach(view => view.draw()));
