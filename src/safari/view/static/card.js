// A chart in its frame: title, words, drawing, pointer and keys, downloads.

import { announce, el, fill, icon, save } from "./dom.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { colours } from "./theme.js";

const HEAD = 44;
const DOWNLOAD = "M8 2v8m0 0 3.2-3.2M8 10 4.8 6.8M2.5 13.5h11";

export class Card {
  constructor(page, chart) {
    Object.assign(this, { page, chart, point: null, seen: false, drag: null, size: [0, 0] });
    this.base = el("canvas", { "aria-hidden": "true" });
    this.top = el("canvas", { "aria-hidden": "true", class: "over" });
    this.blank = el("p", { class: "blank" });
    this.words = el("p", { class: "caption" });
    this.key = el("ul", { class: "legend" });
    this.stage = el("div", { class: "stage", tabindex: "0", role: "group", "aria-roledescription": "chart" }, this.base, this.top);
    this.menu = this.makeMenu();
    const title = el("h3", { id: `title-${chart.id}` }, chart.title);
    this.node = el(
      "section",
      { class: `card${chart.wide ? " wide" : ""}`, id: `card-${chart.id}`, "aria-labelledby": `title-${chart.id}` },
      el("div", { class: "head" }, title, this.menu),
      this.words,
      this.key,
      this.stage,
      this.blank,
    );
    this.listen();
  }

  makeMenu() {
    const kinds = { PNG: () => this.savePng(), SVG: () => this.saveSvg(), CSV: () => this.saveCsv() };
    const menu = el("details", { class: "menu" });
    const pick = (work) => () => {
      menu.open = false;
      work();
    };
    const buttons = Object.entries(kinds).map(([name, work]) => el("button", { type: "button", onclick: pick(work) }, name));
    menu.append(
      el("summary", { "aria-label": `Download ${this.chart.title}`, title: "Download" }, icon(DOWNLOAD)),
      el("div", { class: "choices" }, ...buttons),
    );
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      menu.open = false;
      menu.querySelector("summary").focus();
    });
    menu.addEventListener("focusout", (event) => {
      if (!menu.contains(event.relatedTarget)) menu.open = false;
    });
    return menu;
  }

  listen() {
    new ResizeObserver(() => this.refresh()).observe(this.node);
    new IntersectionObserver(
      (entries) => {
        // A busy page may hear of several changes at once, the newest last.
        this.seen = entries.at(-1).isIntersecting;
        if (this.seen) this.refresh();
      },
      { rootMargin: "400px" },
    ).observe(this.node);
    const { stage } = this;
    stage.addEventListener("pointermove", (event) => this.pointer(event));
    stage.addEventListener("pointerleave", () => this.drag || this.leave());
    stage.addEventListener("pointerdown", (event) => this.press(event));
    stage.addEventListener("pointerup", () => this.release());
    stage.addEventListener("pointercancel", () => (this.drag = null));
    stage.addEventListener("dblclick", () => this.chart.zooms && this.page.state.set({ span: null }));
    stage.addEventListener("keydown", (event) => this.keyDown(event));
    stage.addEventListener("blur", () => this.leave());
  }

  // Draw when there is time for it, and only what can be seen.
  refresh() {
    this.node.hidden = this.chart.absent?.() ?? false;
    if (this.waiting || !this.seen) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.tryToDraw();
    });
  }

  // One chart that fails says so, and leaves the others alone.
  tryToDraw() {
    try {
      this.draw(this.chart.empty());
    } catch (error) {
      console.error(error);
      this.draw(`This chart cannot be drawn: ${error}`);
    }
  }

  draw(nothing) {
    const { chart } = this;
    this.stage.hidden = nothing !== null;
    this.menu.hidden = nothing !== null;
    this.blank.textContent = nothing ?? "";
    this.blank.hidden = nothing === null;
    this.words.textContent = nothing === null ? chart.caption() : "";
    this.drawLegend(nothing === null);
    if (nothing !== null) return;
    const width = this.stage.clientWidth;
    if (!width) return;
    const height = Math.round(chart.height(width));
    this.size = [width, height];
    const pen = paper(this.base, width, height, devicePixelRatio);
    paper(this.top, width, height, devicePixelRatio);
    chart.draw(pen, width, height);
    this.stage.setAttribute("aria-label", `${chart.title}. ${chart.summary()}. Arrow keys read single values.`);
    this.drawOver();
  }

  drawLegend(shown) {
    const entries = shown && chartLegend(this.chart) ? this.chart.legend() : [];
    const key = JSON.stringify(entries);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.key.hidden = !entries.length;
    fill(this.key, entries.map(({ label, colour, edge }) => el("li", {}, el("span", { class: `chip${edge ? " edge" : ""}`, style: { background: colour } }), label)));
  }

  // The cross-hair of all charts, the mark of this one, and what is being dragged.
  drawOver() {
    const [width, height] = this.size;
    if (!width || this.stage.hidden) return;
    const pen = paper(this.top, width, height, devicePixelRatio);
    const { ink, accent } = colours();
    const { round } = this.page.hover;
    if (this.chart.zooms && round !== null) {
      const scale = this.chart.scale(width);
      const x = scale.x(round);
      if (x >= scale.x0 - 1 && x <= scale.x1 + 1) pen.path([[[x, 4], [x, height - 28]]], { line: ink, width: 1, alpha: 0.55 });
    }
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      const [a, b] = [this.drag.from, this.drag.to].sort((p, q) => p - q);
      pen.rect(a, 4, b - a, height - 32, accent, 0.18);
    }
    if (this.found?.mark) this.found.mark(pen);
  }

  place(event) {
    const box = this.stage.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  pointer(event) {
    this.point = this.place(event);
    if (this.drag) this.drag.to = this.point.x;
    this.show(this.point, false);
  }

  press(event) {
    if (!this.chart.zooms || event.pointerType === "touch" || event.button !== 0) return;
    const { x } = this.place(event);
    this.drag = { from: x, to: x };
    this.stage.setPointerCapture(event.pointerId);
  }

  release() {
    const { drag } = this;
    this.drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < 6) return;
    const scale = this.chart.scale(this.size[0]);
    const [first, last] = [drag.from, drag.to].sort((p, q) => p - q).map((x) => Math.round(scale.round(x)));
    if (last > first) this.page.state.set({ span: [first, last] });
  }

  keyDown(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in steps) || this.stage.hidden) return undefined;
    event.preventDefault();
    const next = this.chart.move(this.point, ...steps[event.key], ...this.size);
    if (!next) return undefined;
    this.point = next;
    return this.show(next, true);
  }

  show({ x, y }, spoken) {
    const found = this.chart.hover(x, y, ...this.size);
    this.found = found;
    if (found?.focus !== this.chart.focus) {
      this.chart.focus = found?.focus;
      this.refresh();
    }
    this.page.hoverRound(found?.round ?? null, this);
    this.page.tip.show(found, this.stage, x, y);
    if (spoken && found) announce(`${found.title}: ${found.rows.map((row) => `${row.label} ${row.value}`).join(", ")}`);
  }

  leave() {
    this.point = null;
    this.found = null;
    if (this.chart.focus !== undefined) {
      this.chart.focus = undefined;
      this.refresh();
    }
    this.page.hoverRound(null, this);
    this.page.tip.hide();
  }

  // Drawn once more with its title and its legend.
  export(pen, width, height) {
    const { card, ink, soft } = colours();
    const whose = this.page.store.runs.map((run) => run.name).join(", ");
    pen.rect(0, 0, width, height + HEAD + 24, card);
    pen.text(this.chart.title, 14, 18, ink, { size: 15, weight: 600 });
    pen.text(whose, width - 14, 18, soft, { anchor: "end" });
    let x = 14;
    for (const { label, colour } of chartLegend(this.chart) ? this.chart.legend() : []) {
      pen.rect(x, 33, 12, 12, colour);
      pen.text(label, x + 17, 39, soft);
      x += 33 + pen.measure(label);
    }
  }

  savePng() {
    const [width, height] = this.size;
    const canvas = document.createElement("canvas");
    const pen = paper(canvas, width, height + HEAD + 24, 2);
    this.export(pen, width, height);
    pen.context.translate(0, HEAD + 12);
    this.chart.draw(pen, width, height);
    canvas.toBlob((blob) => save(this.file("png"), blob), "image/png");
  }

  saveSvg() {
    const [width, height] = this.size;
    const measurer = paper(document.createElement("canvas"), 8, 8, 1);
    const pen = new SvgPen(width, height + HEAD + 24, colours().font, measurer);
    this.export(pen, width, height);
    pen.parts.push(`<g transform="translate(0 ${HEAD + 12})">`);
    this.chart.draw(pen, width, height);
    pen.parts.push("</g>");
    save(this.file("svg"), new Blob([pen.toString()], { type: "image/svg+xml" }));
  }

  saveCsv() {
    save(this.file("csv"), new Blob([this.chart.csv().map((row) => row.map(cell).join(",")).join("\r\n"), "\r\n"], { type: "text/csv" }));
  }

  file(kind) {
    const run = this.page.store.runs[0]?.name ?? "run";
    return `${run.replace(/[^A-Za-z0-9._+-]+/g, "-")}-${this.chart.id}.${kind}`;
  }
}

// Lines are named at their ends and on the tiles: they need no legend of their own.
function chartLegend(chart) {
  return Boolean(chart.legend) && !chart.column;
}

function paper(canvas, width, height, ratio) {
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return new CanvasPen(context, colours().font);
}

// A cell that a spreadsheet would take for a formula is made a text.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
