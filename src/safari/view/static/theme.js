// Colours: those of the style sheet for drawing, a ramp for numbers, shades for clients.

const NAMED = ["paper", "card", "ink", "soft", "grid", "accent", "arrived", "lost", "lost-down", "refused", "unknown"];
const LINES = 7;
const GROUPS = 8;
const PARTS = 6;
const DASHES = [[], [7, 3], [2, 3], [8, 3, 2, 3]];

let cached = null;

export function colours() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const many = (name, count) => Array.from({ length: count }, (_, k) => read(`${name}-${k}`));
  cached = Object.fromEntries(NAMED.map((name) => [name, read(name)]));
  cached.lines = many("line", LINES);
  cached.groups = many("group", GROUPS);
  cached.parts = many("part", PARTS);
  cached.font = style.getPropertyValue("--font").trim();
  return cached;
}

const system = matchMedia("(prefers-color-scheme: dark)");

// The style sheet knows light and dark; what "auto" means is found out here.
export function setTheme(name) {
  document.documentElement.dataset.theme = name === "auto" ? (system.matches ? "dark" : "light") : name;
  cached = null;
}

export function onSystemTheme(react) {
  system.addEventListener("change", react);
}

export function lineColour(index) {
  const { lines } = colours();
  return lines[index % lines.length];
}

// The same by name, for what the style sheet draws: it changes with the theme by itself.
export function lineName(index) {
  return `var(--line-${index % LINES})`;
}

export function lineDash(index) {
  return DASHES[Math.floor(index / LINES) % DASHES.length];
}

export function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function hex([r, g, b]) {
  return `#${[r, g, b].map((v) => Math.round(v).toString(16).padStart(2, "0")).join("")}`;
}

function mix(one, other, share) {
  const [a, b] = [rgb(one), rgb(other)];
  return hex(a.map((v, k) => v + (b[k] - v) * share));
}

// Dark to light with evenly growing lightness, told apart by all kinds of colour vision (viridis).
const RAMP = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"].map(rgb);

const SHADES = 256;
let table = null;

function shades() {
  table ??= Uint8ClampedArray.from(Array.from({ length: SHADES }, (_, k) => ramp(k / (SHADES - 1))).flat());
  return table;
}

// Put the colour of a share (or, where it is no number, another one) into a picture.
export function paint(data, at, share, blank) {
  const from = shades();
  const k = 3 * Math.round((SHADES - 1) * Math.max(0, Math.min(1, share)));
  const known = share === share;
  data[at] = known ? from[k] : blank[0];
  data[at + 1] = known ? from[k + 1] : blank[1];
  data[at + 2] = known ? from[k + 2] : blank[2];
  data[at + 3] = 255;
}

function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const k = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[k].map((v, i) => v + (RAMP[k + 1][i] - v) * (at - k));
}

// A colour for each client: the hue of its group, a shade of its own.
export function clientColours(groups) {
  const { groups: hues, card, ink } = colours();
  const size = new Map();
  for (const group of groups) size.set(group, (size.get(group) ?? 0) + 1);
  const seen = new Map();
  return groups.map((group) => {
    const place = seen.get(group) ?? 0;
    seen.set(group, place + 1);
    const hue = hues[group % hues.length];
    const share = size.get(group) < 2 ? 0.5 : place / (size.get(group) - 1);
    return share < 0.5 ? mix(hue, ink, 0.16 * (1 - 2 * share)) : mix(hue, card, 0.32 * (2 * share - 1));
  });
}
