// Numbers as people read them, and round places on an axis.

export const NOTHING = "–";

export function asPercent(value, digits = 1) {
  return value === null || !isFinite(value) ? NOTHING : `${(100 * value).toFixed(digits)} %`;
}

// Enough digits to be exact for what a record holds, not more.
export function exact(value) {
  if (value === null || value === undefined || !isFinite(value)) return NOTHING;
  return String(Number(value.toPrecision(6)));
}

export function asBytes(value) {
  if (value === null || !isFinite(value)) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

export function asSeconds(value) {
  if (value === null || !isFinite(value)) return NOTHING;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(1000 * value).toPrecision(2)} ms`;
  if (value < 99.5) return `${value.toPrecision(2)} s`;
  if (value < 5970) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function asCount(value) {
  return value.toLocaleString("en-GB");
}

export function plural(count, thing) {
  return `${asCount(count)} ${thing}${count === 1 ? "" : "s"}`;
}

// Round numbers between two ends, about as many as wanted; `whole` for counts.
export function ticks(low, high, wanted, whole = false) {
  const span = high - low;
  if (!(span > 0) || !isFinite(span)) return [low];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((k) => k * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * span; k += 1) {
    out.push(Number((k * step).toPrecision(12)));
  }
  // One alone says nothing about the scale.
  return out.length > 1 || (whole && step === 1) ? out : ticks(low, high, 2 * wanted, whole);
}

// Texts of ticks: as many decimals as the step needs.
export function tickTexts(values, format) {
  if (format === "bytes") return values.map((v) => (v === 0 ? "0" : asBytes(v).replace(/\.0+ /, " ")));
  if (format === "seconds") return values.map(asSeconds);
  const scaled = format === "percent" ? values.map((v) => 100 * v) : values;
  const step = scaled.length > 1 ? Math.abs(scaled[1] - scaled[0]) : 1;
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  return scaled.map((v) => v.toFixed(digits) + (format === "percent" ? " %" : ""));
}

export function told(value, format) {
  if (value === null || value === undefined || !isFinite(value)) return NOTHING;
  if (format === "percent") return `${exact(100 * value)} %`;
  if (format === "bytes") return value < 1000 ? asBytes(value) : `${asBytes(value)} (${asCount(Math.round(value))} B)`;
  if (format === "seconds") return value < 1 ? `${exact(1000 * value)} ms` : `${exact(value)} s`;
  return exact(value);
}

export function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

// Sample standard deviation; 0 for one value.
export function deviation(values) {
  if (values.length < 2) return 0;
  const centre = mean(values);
  return Math.sqrt(values.reduce((sum, v) => sum + (v - centre) ** 2, 0) / (values.length - 1));
}

// The place of the last entry that is not above `value`; -1 when all are.
export function lastUpTo(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export function nearest(sorted, value) {
  const at = lastUpTo(sorted, value);
  if (at < 0) return sorted.length ? 0 : -1;
  return at + 1 < sorted.length && sorted[at + 1] - value < value - sorted[at] ? at + 1 : at;
}
