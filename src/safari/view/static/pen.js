// One way to draw, two kinds of paper: a canvas for the screen and PNG, text for SVG.

const TEXT = 12;

export class CanvasPen {
  constructor(context, font) {
    this.context = context;
    this.font = font;
  }

  rect(x, y, width, height, colour, alpha = 1) {
    const c = this.context;
    c.globalAlpha = alpha;
    c.fillStyle = colour;
    c.fillRect(x, y, width, height);
    c.globalAlpha = 1;
  }

  // `lines` are lists of [x, y]; `line` and `fill` are colours.
  path(lines, { line = null, fill = null, width = 1.5, dash = [], alpha = 1, close = false } = {}) {
    const c = this.context;
    c.globalAlpha = alpha;
    c.beginPath();
    for (const points of lines) {
      points.forEach(([x, y], k) => (k ? c.lineTo(x, y) : c.moveTo(x, y)));
      if (close) c.closePath();
    }
    if (fill) {
      c.fillStyle = fill;
      c.fill();
    }
    if (line) {
      c.strokeStyle = line;
      c.lineWidth = width;
      c.lineJoin = "round";
      c.lineCap = "round";
      c.setLineDash(dash);
      c.stroke();
      c.setLineDash([]);
    }
    c.globalAlpha = 1;
  }

  circle(x, y, radius, fill, line = null) {
    const c = this.context;
    c.beginPath();
    c.arc(x, y, radius, 0, 2 * Math.PI);
    c.fillStyle = fill;
    c.fill();
    if (line) {
      c.strokeStyle = line;
      c.lineWidth = 1.5;
      c.stroke();
    }
  }

  text(words, x, y, colour, { anchor = "start", base = "middle", size = TEXT, weight = 400, turn = 0 } = {}) {
    const c = this.context;
    c.save();
    c.translate(x, y);
    c.rotate(turn);
    c.font = `${weight} ${size}px ${this.font}`;
    c.fillStyle = colour;
    c.textAlign = anchor === "middle" ? "center" : anchor;
    c.textBaseline = base === "top" ? "top" : base === "bottom" ? "alphabetic" : "middle";
    c.fillText(words, 0, 0);
    c.restore();
  }

  measure(words, size = TEXT, weight = 400) {
    this.context.font = `${weight} ${size}px ${this.font}`;
    return this.context.measureText(words).width;
  }

  // A small picture, a pixel a cell, stretched with hard edges.
  raster(image, x, y, width, height) {
    const c = this.context;
    c.imageSmoothingEnabled = false;
    c.drawImage(onCanvas(image), x, y, width, height);
  }

  clip(x, y, width, height, draw) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(x, y, width, height);
    c.clip();
    draw();
    c.restore();
  }
}

export class SvgPen {
  constructor(width, height, font, measurer) {
    Object.assign(this, { width, height, font, measurer, parts: [], clips: 0 });
  }

  rect(x, y, width, height, colour, alpha = 1) {
    this.parts.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}" fill="${colour}"${opacity(alpha)}/>`);
  }

  path(lines, { line = null, fill = null, width = 1.5, dash = [], alpha = 1, close = false } = {}) {
    const d = lines
      .filter((points) => points.length)
      .map((points) => `M${points.map(([x, y]) => `${n(x)} ${n(y)}`).join("L")}${close ? "Z" : ""}`)
      .join("");
    const stroke = line ? ` stroke="${line}" stroke-width="${n(width)}" stroke-linejoin="round" stroke-linecap="round"` : "";
    const dashes = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    this.parts.push(`<path d="${d}" fill="${fill ?? "none"}"${stroke}${dashes}${opacity(alpha)}/>`);
  }

  circle(x, y, radius, fill, line = null) {
    const stroke = line ? ` stroke="${line}" stroke-width="1.5"` : "";
    this.parts.push(`<circle cx="${n(x)}" cy="${n(y)}" r="${n(radius)}" fill="${fill}"${stroke}/>`);
  }

  text(words, x, y, colour, { anchor = "start", base = "middle", size = TEXT, weight = 400, turn = 0 } = {}) {
    const shift = base === "top" ? 0.8 * size : base === "bottom" ? 0 : 0.35 * size;
    const rotate = turn ? ` transform="rotate(${n((180 * turn) / Math.PI)} ${n(x)} ${n(y)})"` : "";
    this.parts.push(
      `<text x="${n(x)}" y="${n(y + shift)}" fill="${colour}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}"${rotate}>${escapeXml(words)}</text>`,
    );
  }

  measure(words, size = TEXT, weight = 400) {
    return this.measurer.measure(words, size, weight);
  }

  raster(image, x, y, width, height) {
    const data = onCanvas(image).toDataURL("image/png");
    this.parts.push(
      `<image x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${data}"/>`,
    );
  }

  clip(x, y, width, height, draw) {
    const id = `c${(this.clips += 1)}`;
    this.parts.push(`<clipPath id="${id}"><rect x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}"/></clipPath><g clip-path="url(#${id})">`);
    draw();
    this.parts.push("</g>");
  }

  toString() {
    const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}" font-family="${escapeXml(this.font)}">`;
    return `${head}\n${this.parts.join("\n")}\n</svg>\n`;
  }
}

function escapeXml(words) {
  const named = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  // Control characters may not stand in XML at all.
  return String(words)
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "")
    .replace(/[&<>"']/g, (c) => named[c]);
}

function n(value) {
  return String(Math.round(100 * value) / 100);
}

function opacity(alpha) {
  return alpha === 1 ? "" : ` opacity="${n(alpha)}"`;
}

function onCanvas({ width, height, data }) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  return canvas;
}
